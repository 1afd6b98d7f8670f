"""Several runs at once: what a sweep is told of its jobs and writes down of them; processes that work for this one."""
