"""Calls of every rank, recorded on one clock; merged, summarised and plotted."""
