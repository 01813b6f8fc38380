"""Compiled CPU kernels for specplug's host: the Llama shape in bfloat16."""

from specplug_native.kernels import NativeKernels

__all__ = ["NativeKernels", "kernels"]

kernels = NativeKernels()
"""What the entry point names."""
