"""The commands of the sweep, which run there alone, are commands."""

import pytest
from cases import SWEEP

from dschat.config import RewardConfig, RLHFConfig, SFTConfig, parser


@pytest.mark.parametrize("case", SWEEP, ids=lambda c: c.name)
def test_its_flags_are_taken(case, tmp_path):
    command = case.command(tmp_path, tmp_path / "out")
    script = next(i for i, word in enumerate(command) if word.endswith("main.py"))
    config = {1: SFTConfig, 2: RewardConfig, 3: RLHFConfig}[case.step]
    parser.parse(config, command[script + 1 :])
