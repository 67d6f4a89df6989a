"""Tables and charts of results/models_<gpu>.json, for docs/performance.md; bench/models.py --render calls it."""

import re

import render_cuda
from render_cuda import COLOURS, NAMES, Svg, step_of, table

BEGIN, END = "<!-- models: written by bench/models.py -->", "<!-- models: end -->"
ORDER = ("kda", "gdn", "deltanet", "gdn2")


def rows_of(results, part, mode=None, whole=True):
    """The rows, by model and length; those of models with all layers unless told otherwise."""
    rows = [row for row in results["rows"] if row["part"] == part and row.get("mode") == mode
            and (row["layers"] == results["setup"]["layers"] or not whole)]
    return sorted(rows, key=lambda row: (ORDER.index(row["model"]), -row["layers"], row["T"]))


def name_of(row):
    return NAMES[row["model"]] + ("*" if row.get("unchecked") else "")


def part_of(row):
    return f"{NAMES[row['model']]} {row['part']} at T = {row['T']}"


def milliseconds(timed):
    return f"{timed['median_us'] / 1e3:.2f}"


def signed(percent):
    return f"{percent:+.1f}%"


def shape_of(row, value):
    return [name_of(row), str(row["T"]), value]


def curves(title, panels):
    """panels: [(name, {side: losses})], two side by side, each with its own axes."""
    width, panel_width, panel_height = 1000, 440, 190
    svg = Svg(width, 66 + (len(panels) + 1) // 2 * (panel_height + 54), title)
    sides = [("FLA", COLOURS[1]), ("FLA, nudged", COLOURS[2]), ("rewy", COLOURS[0])]
    keys = ("fla", "fla_nudged", "rewy")
    if not any("fla_nudged" in losses for _, losses in panels):
        sides, keys = sides[::2], keys[::2]
    styles = {"fla": 'stroke-width="5" stroke-opacity=".45"', "rewy": 'stroke-width="1.6"',
              "fla_nudged": 'stroke-width="1.6" stroke-dasharray="3 3"'}
    svg.legend(sides, 16, 48)
    for p, (name, losses) in enumerate(panels):
        left, base = 48 + (p % 2) * (panel_width + 50), 66 + (p // 2) * (panel_height + 54) + panel_height + 10
        height = panel_height - 24
        values = [value for side in losses.values() for value in side]
        step = step_of(max(max(values) - min(values), 1e-3))
        low = step * (min(values) // step)
        high = step * -(-max(values) // step)
        count = max(len(losses["fla"]) - 1, 1)
        x, y = (lambda i: left + panel_width * i / count), (lambda value: base - height * (value - low) / (high - low))
        svg.text(left, base - height - 8, name, "panel")
        for i in range(round((high - low) / step) + 1):
            svg.line(left, y(low + i * step), left + panel_width, y(low + i * step), "grid" if i else "axis")
            svg.text(left - 6, y(low + i * step) + 4, f"{low + i * step:g}", "small", "end")
        for (side, colour), key in zip(sides, keys):
            if key not in losses:
                continue
            points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(losses[key]))
            svg.parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" {styles[key]}><title>{side}</title>'
                             f'</polyline>')
        svg.text(left, base + 15, "1", "small", "middle")
        svg.text(left + panel_width, base + 15, str(len(losses["fla"])), "small", "middle")
        svg.text(left + panel_width / 2, base + 15, "update", "small", "middle")
    return svg.done()


def render(results):
    """(the document's part, {file name: chart})"""
    v, m, s = results["versions"], results["machine"], results["setup"]
    place = re.sub(r"[^a-z0-9]+", "-", re.sub(r"^NVIDIA ", "", m["gpu"]).lower()).strip("-")
    lines = [f"{m['gpu']}, driver {m['driver']}, {results['date']}, commit {results['commit']}. Command: "
             f"`{results['command']}`. torch {v.get('torch')}, Triton {v.get('triton')}, fla-core {v.get('fla-core')}, "
             f"transformers {v.get('transformers')}. {s['layers']} layers, hidden {s['hidden']}, MLP {s['mlp']}, "
             f"{s['heads']} heads of {s['width']}, vocabulary {s['vocabulary']}, batch {s['batch']}, {s['autocast']} "
             f"autocast, FP32 parameters."]
    lines += render_cuda.of_other_commits(results, results["rows"], part_of)
    figures = {}

    shares = {(row["model"], row["T"]): row for row in rows_of(results, "operator", "graph") if "failed" not in row}
    for mode, title in (("graph", "Whole model, CUDA graphs"), ("eager", "Whole model, eager")):
        timed = []
        for row in rows_of(results, "time", mode):
            if "failed" in row:
                timed.append(shape_of(row, f"failed: {row['failed']}") + ["-"] * (7 if mode == "graph" else 5))
                continue
            cells = [milliseconds(row["fla"]["backward"]), milliseconds(row["rewy"]["backward"]),
                     signed(row["backward_gain_percent"])]
            if mode == "graph":
                one = shares.get((row["model"], row["T"]))
                for name in ("fla", "rewy"):
                    whole = row[name]["backward"]["median_us"]
                    alone = one and one["layers"] * one[name]["backward"]["median_us"]
                    cells.append(f"{100 * alone / whole:.0f}%" if one else "-")
            cells += [milliseconds(row["fla"]["forward"]), milliseconds(row["rewy"]["forward"]),
                      signed(row["forward_gain_percent"])]
            timed.append([name_of(row), str(row["T"]), *cells])
        if timed:
            lines += ["", f"### {title}", ""]
            if mode == "graph":
                lines += ["The gain is FLA's time / this library's - 1. The operator's share is its backward of one "
                          "layer, timed alone, times the layers.", ""]
                head = ["model", "T", "backward ms: FLA", "rewy", "gain", "operator's share: FLA", "rewy",
                        "forward ms: FLA", "rewy", "gain"]
            else:
                lines += ["As a training loop runs it: where the host is slower than the GPU, its time counts, and that "
                          "differs by half from one run to the next. The table above is about the kernels.", ""]
                head = ["model", "T", "backward ms: FLA", "rewy", "gain", "forward ms: FLA", "rewy", "gain"]
            lines += table(head, timed)
    gains = [(NAMES[name], results["summary"].get(name)) for name in ORDER if results["summary"].get(name) is not None]
    if gains:
        lines += ["", "Whole-model backward gain over the lengths, from geometric means: "
                  + ", ".join(f"{name} {signed(gain)}" for name, gain in gains) + "."]

    operator = [[name_of(row), str(row["T"])]
                + [cell for part in ("backward", "forward")
                   for cell in (f"{row['fla'][part]['median_us']:.0f}", f"{row['rewy'][part]['median_us']:.0f}",
                                f"{row['fla'][part]['median_us'] / row['rewy'][part]['median_us']:.2f}x")]
                for row in shares.values()]
    if operator:
        lines += ["", "### The operator alone, with a layer's arguments", "",
                  "Normalisation of queries and keys, and gates where the layer leaves them to the operator, are "
                  "inside.", ""]
        lines += table(["model", "T", "backward us: FLA", "rewy", "", "forward us: FLA", "rewy", ""], operator)
    if any(row.get("unchecked") for row in results["rows"]):
        lines += ["", "*FLA refuses to run this backward with this Triton version, because the gradients would be "
                  "wrong; its check was taken out for the timing (`--fla-times-only`)."]

    percent = lambda value: f"{100 * value:.2f}%"

    def differences(rows):
        bar = next((f"{100 * row['bar']:g}%" for row in rows if "bar" in row), "the bar")
        cells = []
        for row in rows:
            about = [name_of(row), str(row["layers"]), str(row["T"])]
            if "failed" in row:
                cells.append([*about, f"failed: {row['failed']}"] + ["-"] * 6)
                continue
            one, fla, rewy = row["difference"], row["off_exact"]["fla"], row["off_exact"]["rewy"]
            cells.append([*about, f"{percent(one['max'])} (`{one['worst']}`)", percent(one["median"]),
                          f"{len(row['above_bar'])} of {row['compared']}", percent(fla["median"]),
                          percent(rewy["median"]), percent(fla["max"]), percent(rewy["max"]),
                          *(percent(row["fla_nudged"][key]) for key in ("max", "median") if "fla_nudged" in row)])
        head = ["model", "layers", "T", "rewy against FLA: maximum", "median", f"above {bar}",
                "against exact, median: FLA", "rewy", "maximum: FLA", "rewy"]
        return table(head + ["FLA nudged: maximum", "median"][:max(map(len, cells)) - len(head)], cells)

    rows = rows_of(results, "layers")
    if rows:
        lines += ["", "### Gradients of each attention layer by itself", "",
                  "Relative differences of the gradients of a layer's parameters and input, in the L2 norm, where its "
                  "input and its output's gradient are those of a step of the whole model with FLA's operators. "
                  "*Exact* has the operator on the CPU in FP32.", "", *differences(rows)]
    rows = rows_of(results, "gradients", whole=False)
    if rows:
        again = max((row["fla_against_itself"] for row in rows if "failed" not in row), default=0)
        lines += ["", "### Gradients of all parameters, one step of the whole model", "",
                  "Same weights and batch. What BF16 rounds differently in one layer grows in those that follow, and "
                  "the rest of the model rounds to BF16 as well: two steps that both are right differ by this much, "
                  "FLA and this library from one another and each from the exact operator. "
                  + ("*Nudged*: FLA against itself with all weights changed by a relative 2^-12. "
                     if any("fla_nudged" in row for row in rows) else "")
                  + f"FLA against a second run of itself: at most {percent(again)}.", "", *differences(rows)]

    rows = [row for row in rows_of(results, "curves", whole=False) if "failed" not in row]
    if rows:
        one, nudged = rows[0], any("fla_nudged" in row["loss"] for row in rows)
        texts = {}
        for row in rows:
            texts.setdefault(row["text"], []).append(NAMES[row["model"]])
        texts = "; ".join(text + f" ({', '.join(names)})" * (len(texts) > 1) for text, names in texts.items())
        figures[f"{place}-curves.svg"] = curves(
            f"Loss with FLA's operators and with rewy's on {m['gpu']}",
            [(f"{NAMES[row['model']]}, {row['layers']} layers, T = {row['T']}", row["loss"]) for row in rows])
        lines += ["", f"### Loss curves, {one['updates']} updates", "",
                  f"{one['optimizer']}; same weights, {texts}."
                  + (" *Nudged*: FLA from weights changed by a relative 2^-12, for what such a difference grows to."
                     if nudged else ""), "",
                  f"![Loss by update](figures/{place}-curves.svg)", ""]
        cells = []
        for row in rows:
            others = [name for name in ("rewy", "fla_nudged") if name in row["loss"]]
            cells.append([name_of(row), str(row["layers"]), str(row["T"]), f"{row['loss']['fla'][0]:.4f}",
                          *(f"{row['loss'][name][-1]:.4f}" for name in ("fla", *others)),
                          *(f"{row[f'{name}_against_fla'][key]:.2g}" for name in others for key in ("max", "mean"))])
        lines += table(["model", "layers", "T", "first loss", "last loss: FLA", "rewy", *["FLA nudged"][:nudged],
                        "rewy against FLA: largest", "mean", *["FLA nudged against FLA: largest", "mean"][:2 * nudged]],
                       cells)
    failed = [row for row in results["rows"] if row["part"] == "served" and "failed" in row]
    lines += [line for row in failed for line in ("", f"{NAMES[row['model']]} was not measured: {row['failed']}")]
    return "\n".join(lines) + "\n", figures


def write(text, figures, document, folder):
    render_cuda.write(text, figures, document, folder, BEGIN, END)
