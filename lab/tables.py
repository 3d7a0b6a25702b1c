"""
The tables of docs/measured.md and the speeds in the README's, made of what lab/bench.py left in
results/ and of others' figures in results/peers.json, which says how those were measured.

    python lab/tables.py        # writes them into the two files
"""
import json
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command
from plumbing.files import whole

import torch

HOME = Path(__file__).resolve().parents[1]
RESULTS = HOME / "results"
PEERS = json.loads((RESULTS / "peers.json").read_text())
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
# the paper's whole steps, and how many times as fast as in 16 bits they are there
PAPER_STEP = {"lora_rank": 16, "group": 1, "prompt": 256, "new": 2048, "card_gib": 0}
PAPER_TIMES = {("7b", 2): 1.5, ("7b", 4): 1.4, ("7b", 8): 1.2,
                ("14b", 2): 1.4, ("14b", 4): 1.2, ("14b", 8): 1.2}


def card(name=None):
    """A card's name in the names of its results, this machine's by default: "NVIDIA H100 80GB HBM3"
    -> h100."""
    name = name or torch.cuda.get_device_name()
    words = [w for w in re.split(r"[ -]", name) if not re.fullmatch(r"NVIDIA|\d+GB|HBM.*|SXM.*", w)]
    return "-".join(words).lower()


# ---- the rows


def results(what, where):
    """The rows of bench.py `what` on a card, each with the card."""
    return [r | {"card": where} for r in json.loads((RESULTS / f"{what}_{where}.json").read_text())]


def speedups(where):
    """{shape: {M: speed-up of the NVFP4 GEMM over cuBLAS}}."""
    points = {}
    for r in results("kernels", where):
        if r["fmt"] == "nvfp4" and r["pass"] == "forward":
            points.setdefault(r["shape"], {})[r["M"]] = r["speedup"]
    return points


def mean(points):
    """{M: geometric mean} of {shape: {M: speed-up}}."""
    return {M: statistics.geometric_mean(p[M] for p in points.values())
            for M in ROWS if all(M in p for p in points.values())}


def billions(size):
    return float(size[:-1])


def decode_rows(where, size, quant):
    """{number of rows: row} with LoRA 16 after prompts of 256 tokens."""
    return {r["rows"]: r for r in results("rollout", where) if r["kind"] == "rows"
            and (r["size"], r["quant"], r["lora_rank"], r["prompt"]) == (size, quant, 16, 256)}


def paper_steps():
    """{(size, format, completions): seconds of a whole step of the paper's shape, on an H200}."""
    return {(r["size"], r["quant"], r["completions"]): r["rollout_s"] + r["update_s"]
            for r in fitted("h200") if PAPER_STEP.items() <= r.items() and "rollout_s" in r}


def other_steps():
    """The steps of other shapes; of a shape the H200's, if it has one."""
    found = {}
    for r in fitted("h100") + fitted("h200"):
        if not PAPER_STEP.items() <= r.items():
            found[tuple(r[k] for k in ("size", "quant", "completions", *PAPER_STEP))] = r
    return sorted(found.values(), key=lambda r: billions(r["size"]))


def fitted(where):
    """The rows of steps but those that ran out of memory."""
    return [r for r in results("step", where) if "update_s" in r]


def times_vllm(size):
    """{rows: how many times as fast as in vLLM, on an H200}."""
    name, both = f"{size}:nvfp4:16", PEERS["vllm_h200"]
    return {int(n): ours / both["tok_s"][name][n] for n, ours in both["here"][name].items()}


# ---- tables: lists of cells, which are text, numbers, or two numbers


def gemm():
    lines = speedups("h200")
    lines["geometric mean of the eight"] = mean(lines)
    lines["on an H100"] = mean(speedups("h100"))
    for name, peer in PEERS.items():
        for key, who in (("geometric_mean", ""), ("here", "here, beside ")):
            if "geometric_mean" in peer and key in peer:
                who += f"{name.partition('_h200')[0]}, {card(peer['card']).upper()}"
                lines[who] = dict(zip(peer["rows"], peer[key], strict=True))
    some = [M for M in ROWS if M != 4]
    yield ["GEMM", *(f"M = {M}" for M in some)]
    for name, points in lines.items():
        yield [name, *map(points.get, some)]


def decoding():
    sizes = sorted({r["size"] for r in results("rollout", "h200")}, key=billions)
    four, sixteen = ([decode_rows("h200", size, quant) for size in sizes]
                     for quant in ("nvfp4", "none"))
    yield ["tokens/s", *map(str.upper, sizes)]
    for n in (1, 8, 64, 128, 256, 512):
        both = ([rows.get(n, {}).get("decode_tok_s") for rows in of] for of in (four, sixteen))
        yield [f"{n} row{'s' * (n > 1)}", *zip(*both, strict=True)]
    for n in (1, 8, 64):
        yield [f"a step of {n} / its bytes",
               *(rows[n]["step_ms"] / rows[n]["floor_ms"] for rows in four)]


def beside_vllm():
    some, both, old = ("1", "2", "8", "32", "64"), PEERS["vllm_h200"], PEERS["vllm"]["tok_s"]
    yield ["rows", *some]
    for name in both["here"]:
        size = name.partition(":")[0]
        yield [size.upper(), *map(both["here"][name].get, some)]
        yield [f"vLLM's {size.upper()}", *map(both["tok_s"][name].get, some)]
        h100 = {str(n): r["decode_tok_s"] for n, r in decode_rows("h100", size, "nvfp4").items()}
        yield ["times", *((times_vllm(size).get(int(n)), n in h100 and h100[n] / old[name][n])
                          for n in some)]


def whole_steps():
    seconds = paper_steps()
    sizes = sorted({size for size, _, _ in seconds}, key=billions)
    yield ["completions", *(f"{size.upper()}, {what}" for size in sizes for what in ("s", "times")),
           "7B NF4, s"]
    for n in (2, 4, 8):
        cells = [n]
        for size in sizes:
            four = seconds.get((size, "nvfp4", n))
            cells += [four, four and (seconds[size, "none", n] / four, PAPER_TIMES.get((size, n)))]
        yield [*cells, seconds["7b", "nf4", n]]


def listing(name, rows, *keys):
    """Rows as they are, their names before these of their figures."""
    yield [name, *keys]
    for r in rows:
        quant = "16 bits" if r.get("quant") == "none" else "NVFP4"
        yield [f"{r['size'].upper()} {quant} {r['card'].upper()}", *map(r.get, keys)]


def summary():
    """Lines of the README's table."""
    def between(values):
        return f"{min(values):.1f} to {max(values):.1f} times"

    def least(size, new):
        peaks = [r["peak_gib"] for r in other_steps() if (r["size"], r["new"]) == (size, new)]
        return f"{min(peaks):.1f}"

    four, sixteen = (decode_rows("h200", "7b", quant) for quant in ("nvfp4", "none"))
    base = between([four[n]["decode_tok_s"] / sixteen[n]["decode_tok_s"]
                    for n in sixteen if n <= 128])
    steps = paper_steps()
    steps = between([steps[size, "none", n] / seconds
                     for (size, quant, n), seconds in steps.items() if quant == "nvfp4"])
    yield ["decoding", f"7B, NVFP4, LoRA: {between(times_vllm('7b').values())} vLLM's speed up to "
           f"64 rows, {base} that of 16 bits up to 128", "[tables](docs/measured.md)"]
    yield ["a step", f"of 2 to 8 completions of 2,048 tokens, 3B to 32B: {steps} as fast as 16 "
           f"bits; a 7B update fits in {least('7b', 2048)} GiB", "[table](docs/measured.md)"]
    yield ["memory", f"a step of the 14B fits in {least('14b', 2048)} GiB, of the 32B in "
           f"{least('32b', 2048)}; of 1,024 tokens, the 32B with LoRA 8 in {least('32b', 1024)}, "
           f"the 72B in {least('72b', 1024)}", "[table](docs/measured.md)"]


# ---- into the files


def cell(value):
    """The Markdown of a value."""
    if isinstance(value, tuple):
        return cell(value[0]) + (f" ({cell(value[1])})" if value[0] and value[1] else "")
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
    return str(value or "")


def filled(text, table):
    """`text` with `table` in place of the one whose first cell is the same."""
    lines = [f"| {' | '.join(map(cell, cells))} |" for cells in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    found = re.findall(rf"^\| {re.escape(table[0][0])} \|.*(?:\n\|.*)*", text, re.M)
    if len(found) != 1:
        raise ValueError(f"docs/measured.md: {len(found)} tables begin with {table[0][0]}, not one")
    return text.replace(found[0], "\n".join(lines))


def texts():
    """{file: its text with the tables as the rows have them now}."""
    readme, measured = HOME / "README.md", HOME / "docs" / "measured.md"
    with_tables, with_lines = measured.read_text(), readme.read_text()
    drawn = results("rollout", "h200")
    step = ("completions", "group", "prompt", "new", "lora_rank", "card_gib", "rollout_s",
            "update_s", "share", "peak_gib")
    for table in (gemm(), decoding(), beside_vllm(), whole_steps(),
                  listing("long completions", [r for r in drawn if r["prompt"] > 256], "lora_rank",
                          "rows", "prompt", "new", "decode_tok_s", "step_ms", "floor_ms"),
                  listing("rollouts", [r for r in drawn if r["kind"] != "rows"], "kind",
                          "prefill_s", "decode_tok_s"),
                  listing("steps", other_steps(), *step),
                  listing("plain", results("plain", "h200"), "rows", "plain_step_ms",
                          "fast_step_ms", "times_step_ms", "plain_update_s", "fast_update_s",
                          "times_update_s", "plain_gib")):
        with_tables = filled(with_tables, list(table))
    for cells in summary():
        with_lines = re.sub(rf"^\| {cells[0]} \|.*$", f"| {' | '.join(cells)} |", with_lines,
                            flags=re.M)
    return {readme: with_lines, measured: with_tables}


def main():
    command.Parser(description=texts.__doc__).parse_args()
    for path, text in texts().items():
        if text != path.read_text():
            print(f"{path.relative_to(HOME)}: tables made anew")
            with whole(path) as part:
                part.write_text(text)


if __name__ == "__main__":
    sys.exit(command.run("lab/tables.py", main))
