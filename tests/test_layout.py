"""How codes lie for the tensor core (fast/layout.py): bit by bit, and back."""
import itertools

import pytest
import torch

from fast import layout
from nvfp4 import FORMATS, quantize


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("N, K", [(8, 128), (24, 384)])
def test_a_tiled_weight_is_the_same_weight(N, K, fmt):
    q = quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), fmt)
    tiled = layout.tile(q)
    back = layout.untile(tiled)
    assert torch.equal(tiled.dequantize(), q.dequantize()) and torch.equal(back.codes, q.codes)
    assert torch.equal(back.scale, q.scale) and back.scale.dtype == q.scale.dtype and tiled.global_scale is q.global_scale
    at = tiled.scale.view(N // 8, K // 128, 8, -1)  # (group, chunk, row, block)
    want = layout.wide_scales(q.scale) if fmt == "nvfp4" else q.scale
    blocks = 128 // FORMATS[fmt].block
    for row, chunk in itertools.product(range(N), range(K // 128)):
        assert torch.equal(at[row // 8, chunk, row % 8], want[row, blocks * chunk : blocks * (chunk + 1)])


def test_scales_lie_where_the_docstring_says():
    """Each E4M3 number in each of a word's four places, and codes of a block whose scale is 0, which a foreign checkpoint may hold."""
    for place in range(4):
        scale = torch.zeros(127, 4, dtype=torch.uint8)
        scale[:, place] = torch.arange(127)
        scale = scale.view(torch.float8_e4m3fn)
        got = layout.wide_scales(scale)
        word = got.view(torch.int32)[:, 0].long() & 0xFFFFFFFF
        byte = (word << 28 | word >> 4) >> 8 * place & 0xFF  # rotated right by 4
        value = (8 + (byte & 7)).double() / 8 * 2.0 ** ((byte >> 3) - 15.0)
        assert torch.equal(torch.where(byte > 0, value, 0), scale[:, place].double())
        assert torch.equal(layout.e4m3_scales(got).double(), scale.double())
    q = quantize(torch.randn(8, 128, generator=torch.Generator().manual_seed(0)), "nvfp4")
    q.scale[3, 2] = 0
    tiled = layout.tile(q)
    assert torch.equal(tiled.dequantize(), q.dequantize()) and not layout.unpack(tiled.codes, "nvfp4")[3, 32:48].any()


def drawing():
    """The docstring's drawing: {(pair letter, p): word bits of s, e, e, m}."""
    rows, where = {"bit": [], "code": [], "field": []}, {}
    for line in layout.__doc__.splitlines():
        if line.startswith(("    bit ", "    code  ", "    field ")):
            rows[line.split()[0]] += line.replace("|", "").split()[1:]
    for bit, code, field in zip(rows["bit"], rows["code"], rows["field"], strict=True):
        where.setdefault((code[0], int(code[1])), []).append((int(bit), field))
    # e, e, m lie together, the higher bit first; d's m may lie below
    return {k: sorted(v, key=lambda b: ("sem".index(b[1]), -b[0])) for k, v in where.items()}


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_lie_where_the_docstring_draws_them(fmt):
    """The drawing is what another implementation of the layout would be written from: every bit of every column, and its rows."""
    where = drawing()
    if FORMATS[fmt].codebook:
        where = {(pair, p): [(8 * i + 4 * p + 3 - b, f) for b, f in enumerate("seem")] for i, pair in enumerate("abcd") for p in (0, 1)}
    assert len(where) == 8 and all([f for _, f in v] == ["s", "e", "e", "m"] for v in where.values())
    for row, column in [(r, c) for c in range(256) for r in (c % 16,)]:
        plane, w, h, t, p = (column % 128 // i % n for i, n in ((64, 2), (16, 4), (8, 2), (2, 4), (1, 2)))
        for code in (8, 4, 2, 1):
            codes = torch.zeros(16, 256, dtype=torch.uint8)
            codes[row, column] = code
            bit = where["abcd"[2 * plane + h], p][(8, 4, 2, 1).index(code)][0]
            words = layout.pack(codes, fmt).view(torch.int32).view(2, 2, 8, 4, 4)  # group of rows, chunk, row, lane, word
            assert words.nonzero().tolist() == [[row // 8, column // 128, row % 8, t, w]]
            assert words.sum().item() & 0xFFFFFFFF == 1 << bit


def test_packing_a_slice_at_a_time_changes_nothing(monkeypatch):
    """Matrices of more than SLICE codes go through in slices of whole row groups, the last of which may be short."""
    codes = torch.randint(0, 16, (40, 256), dtype=torch.uint8)
    packed = layout.pack(codes, "nvfp4")
    monkeypatch.setattr(layout, "SLICE", 20 * 256)
    assert [len(codes[rows]) for rows in layout.slices(*codes.shape)] == [16, 16, 8]
    assert torch.equal(layout.pack(codes, "nvfp4"), packed) and torch.equal(layout.unpack(packed, "nvfp4"), codes)
