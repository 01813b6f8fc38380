"""Verification: which draft tokens stand, and which token ends each row."""

from specplug.verify.plugin import BuiltinVerifier

__all__ = ["BuiltinVerifier"]
