"""Causal LMs over packed rows and a ragged key-value cache: what runs targets, and draft models beside them."""
