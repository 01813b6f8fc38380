"""specplug's conformance kit on the installed method."""

from __future__ import annotations

from specplug.testing import ProposerConformance, Rig

SHARED = Rig(shares_state=True)


class TestSuffix(ProposerConformance):
    method = "suffix"
    rig = SHARED


class TestWithoutSharing(ProposerConformance):
    """Drafts follow from the request's own text alone, so the checks that compare companies run too."""

    method = "suffix"
    options = {"suffix_decoding_max_cached_requests": 0, "suffix_backoff": False}


class TestVllmKeys(ProposerConformance):
    method = "suffix"
    options = {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 100,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }
    rig = SHARED


class TestSmallBounds(ProposerConformance):
    method = "suffix"
    options = {"suffix_cached_tokens": 64, "suffix_step_tokens": 3, "suffix_live": False, "suffix_backoff": False}
    rig = Rig(shares_state=True, max_shared_items=2000)
