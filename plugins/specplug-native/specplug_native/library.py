"""The compiled library and its C structures (``src/``)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec

__all__ = ["Chain", "Heads", "Kind", "Layer", "Library", "Linear", "Scratch", "Shape", "Step", "load_library"]


class Linear(Structure):
    """``packed``: see :func:`specplug_native.weights.packed`; ``bias``: ``[out]``, filled up like the weights."""

    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("in_features", c_int64), ("out_features", c_int64))


class Heads(Structure):
    """How queries, keys and values are laid out, and what scores are multiplied with."""

    _fields_ = (("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("scaling", c_float))


class Shape(Structure):
    """What the layers of a model have in common."""

    _fields_ = (("heads", Heads), ("norm_eps", c_float), ("hidden_size", c_int64), ("intermediate_size", c_int64))


class Layer(Structure):
    """A layer's weights; where its cache is; null or where its output goes, ``[T, hidden_size]``."""

    _fields_ = (
        ("query_key_value", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("capacity", c_int64),
        ("kind", c_int64),
        ("tap", c_void_p),
    )


class Kind(Structure):
    """``hidden``: null, or for each token null or the slots it does not see, ``[spans[token]]`` bytes."""

    _fields_ = (("size", c_int64), ("hidden", c_void_p), ("spans", c_void_p))


class Step(Structure):
    """A step's rows and positions, the rotary table and the layers' kinds."""

    _fields_ = (
        ("rows", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("positions", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_positions", c_int64),
        ("kinds", POINTER(Kind)),
        ("threads", c_int64),
    )


class Scratch(Structure):
    """Room for a step's tokens."""

    _fields_ = tuple((name, c_void_p) for name in ("states", "normed", "heads", "attended", "gated"))


class Chain(Structure):
    """An EAGLE-3 head of one layer around that layer."""

    _fields_ = (
        ("features", Linear),
        ("embeddings", c_void_p),
        ("num_embeddings", c_int64),
        ("embedding_norm", c_void_p),
        ("feature_norm", c_void_p),
        ("output_norm", c_void_p),
        ("adds_to_norm", c_int64),
        ("feeds_back_norm", c_int64),
        ("output", Linear),
        ("target_ids", c_void_p),
    )


class Library:
    """Typed entries of the compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.forward = library.specplug_forward
        self.forward.restype = c_int
        self.forward.argtypes = [
            POINTER(Shape),
            POINTER(Layer),
            c_int64,
            POINTER(Step),
            *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p),
            POINTER(Linear),
            c_void_p,
            c_int64,
            POINTER(Scratch),
            c_void_p,
        ]
        self.layer = library.specplug_layer
        self.layer.restype = c_int
        self.layer.argtypes = [POINTER(Shape), POINTER(Layer), POINTER(Step), c_void_p, POINTER(Scratch)]
        self.chain = library.specplug_chain
        self.chain.restype = c_int
        self.chain.argtypes = [*(c_void_p,) * 4, c_int64, *(c_void_p,) * 5]
        self.norm = library.specplug_norm
        self.norm.restype = None
        self.norm.argtypes = [c_void_p, c_int64, c_int64, c_float, c_void_p, c_void_p]
        self.likeliest = library.specplug_likeliest
        self.likeliest.restype = None
        self.likeliest.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]
        self.products = library.specplug_products
        self.products.restype = None
        self.products.argtypes = [POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p, c_void_p]
        self.linear = library.specplug_linear
        self.linear.restype = None
        self.linear.argtypes = [POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p]


@cache
def load_library() -> Library | None:
    """None on a processor without the instructions it is made of."""
    import torch  # noqa: F401  # first, so that its OpenMP is shared: two pools of threads would be in each other's way

    spec = find_spec("specplug_native._kernels")
    if spec is None or spec.origin is None:
        raise ImportError("specplug-native is installed without its compiled library; install it again with pip")
    library = ctypes.CDLL(spec.origin)
    return Library(library) if library.specplug_can_run() else None
