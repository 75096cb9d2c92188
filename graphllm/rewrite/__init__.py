"""What a pass may use: the unit that it edits, its contract and registration, and which implementations there are."""

from graphllm.rewrite.implementations import ImplChoice, candidates, choices, choose, is_implemented, site_key, site_of
from graphllm.rewrite.match import bound, bound_once, only_user, sum_with
from graphllm.rewrite.passes import Pass, PassReport, register_pass, registered_passes
from graphllm.rewrite.unit import Unit, fake_values, results_of

__all__ = [
    "ImplChoice", "Pass", "PassReport", "Unit", "bound", "bound_once", "candidates", "choices", "choose", "fake_values",
    "is_implemented", "only_user", "register_pass", "registered_passes", "results_of", "site_key", "site_of",
    "sum_with",
]  # fmt: skip
