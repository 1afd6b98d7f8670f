"""Several runs at once: what a sweep is told of its jobs and writes down of them; jobs as processes."""
