"""Verification as Triton kernels, one file per operation; importing this package needs Triton."""
