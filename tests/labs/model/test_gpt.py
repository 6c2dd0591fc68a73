"""The GPT: GPT-2's parameter counts, its start, what it computes, and what it refuses."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from labs.model.gpt import GPT, GPTConfig, generate

SMALL = GPTConfig(n_layer=2, n_head=2, d_model=16, vocab_size=11, context=8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL)


class TestSizes:
    @pytest.mark.parametrize(
        ("preset", "changes", "published"),
        [
            ("gpt2", {}, 124_439_808),
            ("gpt2", {"tied": False}, 163_037_184),
            ("gpt2-medium", {}, 354_823_168),
            ("gpt2-large", {}, 774_030_080),
            ("gpt2-xl", {}, 1_557_611_200),
            ("teaching", {}, 1_040_768),
        ],
    )
    def test_parameter_counts_are_the_published_ones(self, preset, changes, published):
        with torch.device("meta"):
            assert GPT(GPTConfig.preset(preset, **changes)).num_params() == published

    def test_a_tied_weight_is_one_parameter(self, model):
        assert model.head.weight is model.tok_emb.weight
        untied = GPT(dataclasses.replace(SMALL, tied=False))
        assert untied.head.weight is not untied.tok_emb.weight

    def test_without_bias_only_weights_are_left(self):
        names = [name for name, _ in GPT(dataclasses.replace(SMALL, bias=False)).named_parameters()]
        assert names
        assert not [name for name in names if name.endswith("bias")]


class TestStart:
    def test_belongs_to_the_seed_last_given_to_torch(self):
        torch.manual_seed(5)
        torch.rand(3)  # what was drawn since does not matter
        models = [GPT(SMALL), GPT(SMALL), GPT(SMALL, seed=5), GPT(SMALL, seed=6)]
        weights = [model.layers[1].mlp.fc.weight for model in models]
        assert torch.equal(weights[0], weights[1])
        assert torch.equal(weights[0], weights[2])
        assert not torch.equal(weights[0], weights[3])


class TestForward:
    def test_gives_logits_or_the_mean_cross_entropy(self, model):
        idx, targets = torch.randint(11, (3, 8)), torch.randint(11, (3, 8))
        logits = model(idx)
        assert logits.shape == (3, 8, 11)
        expected = F.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1))
        torch.testing.assert_close(model(idx, targets), expected)

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_targets_of_minus_1_count_for_nothing(self, model, reduction):
        idx, targets = torch.randint(11, (3, 8)), torch.randint(11, (3, 8))
        targets[0], targets[1, 3:] = -1, -1
        losses = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
        counted = losses[targets.flatten() != -1]
        assert len(counted) == 3 + 8
        torch.testing.assert_close(model(idx, targets, reduction=reduction), getattr(counted, reduction)())

    def test_the_sum_over_nothing_is_0_with_gradients_of_0(self, model):
        idx = torch.randint(11, (2, 8))
        loss = model(idx, torch.full_like(idx, -1), reduction="sum")
        loss.backward()
        assert loss == 0
        assert not any(parameter.grad.any() for parameter in model.parameters())

    def test_the_loss_of_a_bf16_model_is_fp32(self, model):
        idx = torch.randint(11, (2, 8))
        assert model.bfloat16()(idx, idx).dtype == torch.float32

    def test_more_tokens_than_positions_is_an_error(self, model):
        with pytest.raises(ValueError, match="rows of 9 tokens, but context=8"):
            model(torch.zeros(1, 9, dtype=torch.int64))

    def test_dropout_acts_in_training_only(self):
        model = GPT(dataclasses.replace(SMALL, dropout=0.5))
        idx = torch.randint(11, (1, 8))
        assert not torch.equal(model(idx), model(idx))
        model.eval()
        assert torch.equal(model(idx), model(idx))


class TestGenerate:
    def test_appends_the_likeliest_token(self, model):
        prompt = torch.tensor([1, 2, 3])
        tokens = generate(model, prompt, 8)  # runs past the context of 8
        assert tokens.shape == (11,)
        assert tokens[:3].tolist() == [1, 2, 3]
        assert tokens[3] == model(prompt[None])[0, -1].argmax()

    def test_draws_by_the_probabilities(self, model):
        prompt = torch.tensor([4])
        with torch.no_grad():
            model.tok_emb.weight *= 10  # probabilities that are not all alike
        generator = torch.Generator().manual_seed(1)
        draws = torch.stack([generate(model, prompt, 1, temperature=2.0, generator=generator)[1] for _ in range(2000)])
        expected = (model(prompt[None])[0, -1] / 2).softmax(-1)
        torch.testing.assert_close(draws.bincount(minlength=11) / 2000, expected.detach(), rtol=0, atol=0.05)
        assert expected.max() > 2 * expected.min()


class TestErrors:
    @pytest.mark.parametrize(
        ("field", "value"), [("n_layer", 0), ("n_head", -1), ("d_model", 1.5), ("vocab_size", True), ("context", "4")]
    )
    def test_sizes_are_positive_whole_numbers(self, field, value):
        with pytest.raises(ValueError, match=f"{field}={value!r}: it is a whole number"):
            GPTConfig.preset("teaching", **{field: value})

    def test_heads_divide_the_width(self):
        with pytest.raises(ValueError, match="d_model=128 does not divide into n_head=3 heads; use d_model=126 or 129"):
            GPTConfig.preset("teaching", n_head=3)

    def test_dropout_in_range(self):
        with pytest.raises(ValueError, match=r"dropout=1\.0"):
            GPTConfig.preset("teaching", dropout=1.0)
