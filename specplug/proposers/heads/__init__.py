"""Shared machinery of heads: small networks that draft from the target's hidden states.

With a cache of their own: ``reader`` (what a network offers, and how its cache follows the text), ``proposer`` (chains,
and all tokens at once), ``tree`` (EAGLE-2's trees), ``layers`` (decoder layers). Without: ``last_state``. For both:
``features`` (states per request), ``vocabulary`` (reduced ones), ``files`` and ``manifest`` (checkpoints). Most modules
import torch; import them inside a factory.
"""
