"""A wrong sign, an off-by-one or a swapped argument anywhere in the losses is noticed by the
hand-computed tests.
"""

import test_trainer_losses
import test_trainer_objective

from mutation import Runner, survivors
from pipelinerl_trainer import losses, objective

SUBJECTS = [module.__name__ for module in (losses, objective)]
TESTS = [module.__name__ for module in (test_trainer_losses, test_trainer_objective)]

_SUMS = "sums_N = values_T.new_zeros(int(sequence_T.max()) + 1).index_add(0, sequence_T, values_T)"
EQUIVALENT = {
    f"{_SUMS}: 1 -> 2": "one more sum, of a sequence that no token belongs to",
    f"{_SUMS}: 0 -> -1": "the only dimension is the first and the last",
    "advantage = 0.0: 0.0 -> 1.0": "the last token of a row is the last of its sequence, so "
    "nothing is carried into it",
    "advantage = 0.0: 0.0 -> -1.0": "the same",
    "for delta, is_last in zip(reversed(deltas), reversed(is_last_T.tolist()), strict=True):: True "
    "-> False": ("both come from the same column, so they are equally long"),
    'error_T = value_loss(scores.values_T, _required(columns.returns_T, "returns")): '
    "value_loss(scores.values_T, _required(columns.returns_T, 'returns')) -> "
    "value_loss(_required(columns.returns_T, 'returns'), scores.values_T)": "a squared difference",
}


def test_every_mutant_is_noticed_or_computes_the_same() -> None:
    runner = Runner(SUBJECTS, TESTS)
    assert len(runner.mutants()) > 150
    assert sorted(survivors(runner)) == sorted(EQUIVALENT)
