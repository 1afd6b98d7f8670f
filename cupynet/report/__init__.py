"""What people look at: a page for each run, and the pieces that pages are made of.

`page` writes HTML and `charts` draws lines, by matplotlib where it is; `python -m cupynet.report RUN` makes the page of
a run. Nothing here imports what computes: a page is a function of a folder.
"""
