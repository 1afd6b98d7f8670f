"""Sweeps: the record of their jobs (sweep.csv) and tables of figures."""
