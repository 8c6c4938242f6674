"""Verbs over continuous batching: tables of pages, attention over them, and their manager."""
