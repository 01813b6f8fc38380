"""Shared machinery of heads: small networks that draft from the target's hidden states.

``features``: what is kept of those states per request. The modules import torch; import them inside a factory.
"""
