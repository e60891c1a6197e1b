"""The policy of the RL example learns, and rollouts get its bytes."""

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Transformers and its dependencies deprecate
    pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    transformers = pytest.importorskip("transformers", minversion="5.23")
    import rl_weight_sync

import float8lab

pytestmark = pytest.mark.filterwarnings("default")


def test_rewards_grow_and_rollouts_have_the_policys_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    synced = []

    def sync(policy, config):
        rollout = original(policy, config)
        synced.append(rollout)
        for (name, p), q in zip(policy.named_parameters(), rollout.parameters(), strict=True):
            values = p.dequantize() if isinstance(p, float8lab.Float8Tensor) else p
            assert torch.equal(values.to(q.dtype), q), name
        return rollout

    original = rl_weight_sync.sync
    monkeypatch.setattr(rl_weight_sync, "sync", sync)
    assert rl_weight_sync.main(["--steps", "6", "--length", "8"]) > 0.1
    assert len(synced) == 6
    assert "mean reward" in capsys.readouterr().out
