"""The policy of the RL example learns, and the rollout models get its bytes."""

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of Transformers and its dependencies
    pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    transformers = pytest.importorskip("transformers", minversion="5.23")
    import rl_weight_sync

import float8lab

pytestmark = pytest.mark.filterwarnings("default")


def test_rewards_grow_and_rollouts_have_the_policys_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rollouts = []

    def checked_sync(policy, config):
        rollout = original(policy, config)
        rollouts.append(rollout)
        for (name, p), q in zip(policy.named_parameters(), rollout.parameters(), strict=True):
            values = p.dequantize() if isinstance(p, float8lab.Float8Tensor) else p
            assert torch.equal(values.to(q.dtype), q), name
        return rollout

    original = rl_weight_sync.sync
    monkeypatch.setattr(rl_weight_sync, "sync", checked_sync)
    assert rl_weight_sync.main(["--steps", "6", "--length", "8"]) > 0.1
    assert len(rollouts) == 6
    assert "mean reward" in capsys.readouterr().out
