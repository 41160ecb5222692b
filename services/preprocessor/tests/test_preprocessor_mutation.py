"""A wrong sign, an off-by-one or a swapped argument in advantages and penalties is noticed by the
hand-computed tests.
"""

import test_preprocessor_advantage
import test_preprocessor_penalty

from mutation import Runner, survivors
from pipelinerl_preprocessor import advantage

EQUIVALENT = {
    "excess = max(sample.segment_lengths[1::2], default=0) - (max_tokens - buffer): 0 -> -1": (
        "of nothing sampled; what is below 0 counts as 0 afterwards"
    ),
}


def test_every_mutant_is_noticed_or_computes_the_same() -> None:
    tests = [test_preprocessor_advantage.__name__, test_preprocessor_penalty.__name__]
    runner = Runner([advantage.__name__], tests)
    assert len(runner.mutants()) > 50
    assert sorted(survivors(runner)) == sorted(EQUIVALENT)
