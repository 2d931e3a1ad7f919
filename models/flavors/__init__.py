"""The numbers of each family, one file for each: a table FLAVORS of the published sizes and of small
ones of ours, and a value NUMBERS (`models/options.py::Numbers`). No torch: `configs/` imports them.
"""
