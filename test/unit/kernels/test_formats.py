"""Number formats: the specification's examples, every code, every tie, and the corners of the ranges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.kernels import formats as f

ALL_BYTES = torch.arange(256).to(torch.uint8)
EXAMPLE = [0.1, -0.9, 2.6, 5.1, -0.24, 0.74, 3.4, -7.3]
"""model.md §5.7; the rest of the group is zero."""

QUANTISERS = {
    "e4m3/e8m0": (f.quantize_e4m3_e8m0, f.dequant_e4m3_e8m0, 32),
    "e2m1/e8m0": (f.quantize_e2m1_e8m0, f.dequant_e2m1_e8m0, 32),
    "e2m1/e4m3": (f.quantize_e2m1_e4m3, f.dequant_e2m1_e4m3, 16),
}


@pytest.fixture(params=QUANTISERS)
def quantiser(request):
    return QUANTISERS[request.param]


def e4m3_by_definition(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 0x80 else magnitude


@pytest.mark.parametrize("code", range(256))
def test_e4m3_codes_have_the_defined_values_and_survive_a_round_trip(code):
    value = f.decode_e4m3(ALL_BYTES[code : code + 1])
    expected = e4m3_by_definition(code)
    assert torch.equal(value.isnan(), torch.tensor([math.isnan(expected)]))
    if not math.isnan(expected):
        assert value.item() == expected
        assert f.encode_e4m3(value).item() == code


def test_e4m3_ties_go_to_the_even_code_and_neighbours_of_ties_do_not():
    codes = torch.arange(0, 126).to(torch.uint8)
    low, high = f.decode_e4m3(codes), f.decode_e4m3(codes + 1)
    middle = (low + high) / 2  # exact: four significant bits and one more
    even = torch.where(codes % 2 == 0, codes, codes + 1)
    assert torch.equal(f.encode_e4m3(middle), even)
    assert torch.equal(f.encode_e4m3(torch.nextafter(middle, low)), codes)
    assert torch.equal(f.encode_e4m3(torch.nextafter(middle, high)), codes + 1)
    assert torch.equal(f.encode_e4m3(-middle), even + 128)


@pytest.mark.parametrize("value", [448.0, 464.0, 1e9, 3.4e38, math.inf])
def test_e4m3_saturates(value):
    assert f.encode_e4m3(torch.tensor([value, -value])).tolist() == [0x7E, 0xFE]


def test_e8m0_codes_are_powers_of_two_and_255_is_nan():
    values = f.decode_e8m0(ALL_BYTES)
    assert values[255].isnan()
    for code in range(255):
        assert values[code].item() == 2.0 ** (code - 127)  # code 0 is a float32 subnormal


def test_e8m0_rounds_up_but_keeps_exact_powers():
    powers = f.decode_e8m0(torch.arange(1, 254).to(torch.uint8))
    codes = torch.arange(1, 254).to(torch.uint8)
    assert torch.equal(f.encode_e8m0_ceil(powers), codes)
    assert torch.equal(f.encode_e8m0_ceil(torch.nextafter(powers, torch.tensor(math.inf))), codes + 1)
    assert torch.equal(f.encode_e8m0_ceil(powers * 1.5), codes + 1)


def test_e2m1_low_nibble_is_the_even_feature():
    packed = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)
    assert f.decode_e2m1(packed).tolist() == [[0.5, 1.0, 0.0, -6.0]]


def test_e2m1_every_byte_survives_a_round_trip():
    assert torch.equal(f.encode_e2m1(f.decode_e2m1(ALL_BYTES[:, None])), ALL_BYTES[:, None])


@pytest.mark.parametrize("value, nearest", [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (6.1, 6), (1e30, 6)])
def test_e2m1_ties_and_saturation(value, nearest):
    values = torch.tensor([[value, -value]], dtype=torch.float32)
    assert f.decode_e2m1(f.encode_e2m1(values)).tolist() == [[nearest, -nearest]]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("e2m1/e8m0", [0, -1, 3, 6, -0.0, 1, 3, -8]),
        ("e2m1/e4m3", [0, -0.625, 2.5, 5, -0.0, 0.625, 3.75, -7.5]),
        ("e4m3/e8m0", [0.1015625, -0.875, 2.5, 5, -0.234375, 0.75, 3.5, -7.5]),
    ],
)
def test_the_example_of_the_specification(name, expected):
    quantise, dequantise, group = QUANTISERS[name]
    values = torch.zeros(1, group)
    values[0, : len(EXAMPLE)] = torch.tensor(EXAMPLE)
    restored = dequantise(*quantise(values))
    assert restored[0, : len(EXAMPLE)].tolist() == expected
    assert not restored[0, len(EXAMPLE) :].any()


def test_a_zero_group_has_zero_codes_and_the_smallest_scale():
    zeros = torch.zeros(2, 32)
    assert [t.unique().tolist() for t in f.quantize_e4m3_e8m0(zeros)] == [[0], [105]]  # 1e-4 / 448 rounded up: 2^-22
    assert [t.unique().tolist() for t in f.quantize_e2m1_e8m0(zeros)] == [[0], [1]]  # 2^-126
    packed, scale = f.quantize_e2m1_e4m3(zeros)
    assert not packed.any()
    assert f.decode_e4m3(scale).unique().tolist() == [2.0**-9]


def test_tiny_values_below_the_floor_of_the_scale():
    values = torch.full((1, 32), 1e-40)  # subnormal in float32
    for quantise, dequantise, group in QUANTISERS.values():
        assert not dequantise(*quantise(values[:, :group])).any()


@pytest.mark.parametrize("exponent", [-20, -3, 0, 1, 9])
def test_a_largest_value_that_is_an_exact_multiple_of_the_format_does_not_bump_the_scale(exponent):
    for quantise, largest in ((f.quantize_e4m3_e8m0, 448.0), (f.quantize_e2m1_e8m0, 6.0)):
        values = torch.zeros(1, 32)
        values[0, 5] = largest * 2.0**exponent
        bumped = values * (1 + 2.0**-22)
        expected = max(exponent, -22 if largest == 448.0 else -126) + 127
        assert quantise(values)[1].item() == expected
        assert quantise(bumped)[1].item() == expected + 1


def test_large_amax_saturates_the_e4m3_scale():
    packed, scale = f.quantize_e2m1_e4m3(torch.full((1, 16), 1e6))
    assert f.decode_e4m3(scale).item() == 448.0
    assert f.decode_e2m1(packed).unique().tolist() == [6.0]


def test_rows_do_not_influence_each_other(quantiser):
    quantise, _, _ = quantiser
    rows = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 7)[:, None]
    codes, scale = quantise(rows)
    for i in range(7):
        for whole, alone in zip((codes, scale), quantise(rows[i : i + 1])):
            assert torch.equal(whole[i : i + 1], alone)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32))
def test_quantising_restored_values_changes_nothing(values):
    """Values that a format can hold are held exactly. (Not so for E4M3 scales: the largest value may be above 6 scales.)"""
    tensor = torch.tensor([values])
    for name in ("e4m3/e8m0", "e2m1/e8m0"):
        quantise, dequantise, _ = QUANTISERS[name]
        restored = dequantise(*quantise(tensor))
        assert torch.equal(dequantise(*quantise(restored)), restored)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32))
def test_error_is_at_most_half_a_step(values):
    tensor = torch.tensor([values])
    largest = tensor.abs().max().item()
    assert (f.fake_quant_e4m3(tensor) - tensor).abs().max().item() <= max(largest, 1e-4) / 14
    assert (f.dequant_e2m1_e8m0(*f.quantize_e2m1_e8m0(tensor)) - tensor).abs().max().item() <= largest / 3


def test_fake_quantisation_is_the_round_trip():
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    assert torch.equal(f.fake_quant_e4m3(x), f.dequant_e4m3_e8m0(*f.quantize_e4m3_e8m0(x)))


def test_fp8_tiles_cover_32_rows_and_32_columns_with_ragged_ends():
    codes = torch.full((33, 65), 0x38, dtype=torch.uint8)  # 1.0
    scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    values = f.dequant_fp8_block(codes, scale)
    for i, k in ((0, 0), (31, 31), (0, 32), (31, 64), (32, 0), (32, 63), (32, 64)):
        assert values[i, k].item() == 2.0 ** (int(scale[i // 32, k // 32]) - 127)


def test_fp8_values_are_exact_in_bfloat16():
    codes = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F].repeat(8)[: 63 * 32].reshape(63, 32)
    scale = torch.tensor([[100], [140]], dtype=torch.uint8)
    values = f.dequant_fp8_block(codes, scale)
    assert torch.equal(values.bfloat16().float(), values)


def test_fp4_scales_belong_to_rows_not_tiles():
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)  # 1.0, 1.0
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = f.dequant_fp4_rows(packed, scale)
    assert values[:, [0, 31, 32, 63]].tolist() == [[1, 1, 2, 2], [4, 4, 8, 8]]


def test_fake_quantisation_is_quantisation_and_back():
    """The short cut for activations gives the bits of the long way, at powers of two, tiny and huge values too."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 96, generator=generator) * torch.logspace(-9, 9, 64)[:, None]
    values[0, :32] = 0.0
    values[1, :32] = 448.0
    values[2, :32] = 2.0**-20
    assert torch.equal(f.fake_quant_e4m3(values), f.dequant_e4m3_e8m0(*f.quantize_e4m3_e8m0(values)))
