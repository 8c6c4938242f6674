"""Verbs over what is loaded: configs, classes of models, weights, tables of GGUF."""
