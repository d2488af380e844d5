# SPDX-License-Identifier: Apache-2.0
import math

import pytest

torch = pytest.importorskip("torch")

from cudagraphs.capture import digest, parity  # noqa: E402

CPU = torch.device("cpu")


def one(tensor, name="decoder.layers.0.mlp.linear_fc1.weight", digester=None):
    (out,) = (digester or digest.Digester(CPU)).groups([(name, tensor)]).values()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_bits_give_equal_digests_and_one_changed_bit_does_not(dtype):
    source = torch.Generator().manual_seed(0)
    tensor = torch.randn(1000, generator=source).to(dtype)
    other = tensor.clone()
    other[531] = (
        torch.nextafter(other[531].float(), torch.tensor(9.0)).to(dtype)
        if dtype == torch.float32
        else other[531] * 1.01
    )
    assert one(tensor) == one(tensor.clone())
    assert one(tensor)["hash"] != one(other)["hash"]


def test_two_elements_swapped_change_the_hash():
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(1))
    other = tensor.clone()
    other[[3, 4]] = other[[4, 3]]
    assert one(tensor)["hash"] != one(other)["hash"]


def test_minus_zero_and_nan_are_told_apart():
    assert one(torch.zeros(4))["hash"] != one(-torch.zeros(4))["hash"]
    broken = one(torch.tensor([1.0, math.nan]))
    assert parity.relative(one(torch.tensor([1.0, 2.0])), broken) == math.inf


def test_the_norm_and_size_are_exact():
    out = one(torch.tensor([3.0, 4.0]))
    assert out["norm"] == 5.0 and out["numel"] == 2


@pytest.mark.parametrize("change", [1e-3, 1e-2, 0.3])
def test_the_sketch_estimates_the_distance(change):
    source = torch.Generator().manual_seed(2)
    a = torch.randn(20000, generator=source)
    b = a + change * torch.randn(20000, generator=source)
    true = float((a - b).norm() / a.norm())
    assert parity.relative(one(a), one(b)) == pytest.approx(true, rel=0.35)


def test_a_change_of_direction_with_equal_norm_is_seen():
    a = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    assert parity.relative(one(a), one(a.flip(0))) > 1


def test_parameters_add_up_in_their_group():
    digester = digest.Digester(CPU)
    out = digester.groups(
        [("mlp.linear_fc1.weight", torch.tensor([3.0])), ("mlp.linear_fc2.weight", torch.tensor([4.0]))]
    )
    assert out["mlp"]["norm"] == 5.0 and out["mlp"]["numel"] == 2


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("module.module.embedding.word_embeddings.weight", "embedding"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", "attention"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "norm"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "mlp"),
        ("decoder.layers.0.mlp.router.weight", "router"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight0", "experts"),
        ("decoder.final_layernorm.weight", "norm"),
        ("decoder.layers.1.mixer.in_proj.weight", "mamba"),
        ("module.output_layer.weight", "output"),
        ("layers.1.attn.qkv.weight", "attention"),
        ("layers.1.mlp.fc2.weight", "mlp"),
        ("head.weight", "output"),
        ("layers.0.layernorm_mlp.fc1_weight", "mlp"),
        ("layers.0.self_attention.layernorm_qkv.query_weight", "attention"),
        ("rotary.inv", "other"),
    ],
)
def test_the_group_of_a_parameter(name, group):
    assert digest.group(name) == group
