"""Verification: which draft tokens stand, and which token ends each row."""

from specplug.verify.plugin import BuiltinVerifier
from specplug.verify.synthetic import conditional_rates, rates_from_length

__all__ = ["BuiltinVerifier", "conditional_rates", "rates_from_length"]
