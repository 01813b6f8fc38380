"""Compiled CPU kernels for specplug's host: the Llama shape in bfloat16."""

from specplug_native.decoder import NativeDecoder, decoder_for

__all__ = ["NativeDecoder", "decoder_for"]
