"""Tables and charts of results/<gpu>.json, for docs/performance.md; bench/run_cuda.py --render calls it.

Charts are SVG written here: transparent, in colours that can be read on white and on black, with text that follows the
reader's colour scheme.
"""

import math
import os
import re

from time_fla import LARGE, OPERATORS, SHAPES

BEGIN, END = "<!-- cuda: written by bench/run_cuda.py -->", "<!-- cuda: end -->"
NAMES = {"deltanet": "DeltaNet", "gdn": "GDN", "kda": "KDA", "gdn2": "GDN2"}
CALLS = (("forward", "fwd", "recompute"), ("backward, recompute", "bwd", "recompute"), ("backward, saved", "bwd", "save"))
COLOURS = ("#3b82c4", "#d97a2b", "#3f9f6b", "#9a6bc2", "#c05a78", "#8a8f2e")


# Charts.

STYLE = """<style>
  text { font-size: 12px; font-family: "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #333 }
  .title { font-size: 15px; font-weight: 600 } .panel { font-weight: 600 } .small { font-size: 10.5px }
  .grid { stroke: #888; stroke-opacity: .25 } .axis { stroke: #888 } .mark { stroke: #888; stroke-dasharray: 5 3 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } }
</style>"""


class Svg:
    def __init__(self, width, height, title):
        self.width, self.height = width, height
        self.parts = [STYLE, f"<title>{escape(title)}</title>"]
        self.text(16, 24, title, "title")

    def text(self, x, y, text, kind="", anchor="start", turn=False):
        turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>'
                          f'{escape(text)}</text>')

    def line(self, x1, y1, x2, y2, kind):
        self.parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def bar(self, x, y, width, height, colour, hint):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" '
                          f'fill="{colour}"><title>{escape(hint)}</title></rect>')

    def legend(self, names, x, y):
        for name, colour in names:
            self.bar(x, y - 10, 11, 11, colour, name)
            self.text(x + 16, y, name)
            x += 36 + 6.6 * len(name)

    def done(self):
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}" role="img">\n' + "\n".join(self.parts) + "\n</svg>\n")


def escape(text):
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def step_of(most, steps=5):
    """A round distance of grid lines."""
    power = 10.0 ** math.floor(math.log10(most / steps))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= most / steps * (1 - 1e-9))


def shape_text(shape):
    return f"({', '.join(map(str, shape))})"


def grouped_bars(title, series, panels, axis, number, mark=None):
    """panels: [(name, [(group, [value or None for each series])])], two side by side, one axis for all."""
    width, panel_width, panel_height = 1000, 452, 190
    rows = (len(panels) + 1) // 2
    svg = Svg(width, 66 + rows * (panel_height + 62), title)
    svg.legend([(name, COLOURS[i]) for i, name in enumerate(series)], 16, 48)
    most = max([v for _, groups in panels for _, values in groups for v in values if v is not None] + [mark or 0])
    step = step_of(most * 1.08)
    top = step * -(-most * 1.08 // step)
    for p, (name, groups) in enumerate(panels):
        left, base = 48 + (p % 2) * (panel_width + 26), 66 + (p // 2) * (panel_height + 62) + panel_height + 14
        height = panel_height - 20
        y = lambda value: base - height * value / top
        svg.text(left, base - height - 8, name, "panel")
        for i in range(round(top / step) + 1):
            svg.line(left, y(i * step), left + panel_width, y(i * step), "grid" if i else "axis")
            svg.text(left - 6, y(i * step) + 4, f"{i * step:g}", "small", "end")
        if p % 2 == 0:
            svg.text(14, base - height / 2, axis, "small", "middle", turn=True)
        room = panel_width / len(groups)
        bar = min(24.0, room * 0.84 / len(series))
        for g, (group, values) in enumerate(groups):
            shown = [(i, v) for i, v in enumerate(values) if v is not None]
            x = left + room * (g + 0.5) - bar * len(shown) / 2
            for i, value in shown:
                svg.bar(x + 1, y(value), bar - 2, base - y(value), COLOURS[i],
                        f"{name} {group}, {series[i]}: {number(value)}")
                svg.text(x + bar / 2, y(value) - 3, number(value), "small", "middle")
                x += bar
            svg.text(left + room * (g + 0.5), base + 15, group, "small", "middle")
        svg.text(left + panel_width / 2, base + 31, "(B, T, H)", "small", "middle")
        if mark is not None:
            svg.line(left, y(mark), left + panel_width, y(mark), "mark")
    return svg.done()


def stacked_bars(title, rows, axis):
    """rows: [(name, [(part, value)])], one bar each; a part has one colour in all of them."""
    parts = list(dict.fromkeys(part for _, values in rows for part, _ in values))
    colour = {part: COLOURS[i % len(COLOURS)] for i, part in enumerate(parts)}
    left, right, top, room = 150, 920, 74, 32
    svg = Svg(980, top + room * len(rows) + 48, title)
    svg.legend([(part, colour[part]) for part in parts], 16, 48)
    most = max(sum(value for _, value in values) for _, values in rows)
    step = step_of(most)
    scale = (right - left) / most
    base = top + room * len(rows)
    for i in range(int(most / step) + 1):
        x = left + i * step * scale
        svg.line(x, top - 8, x, base, "grid" if i else "axis")
        svg.text(x, base + 15, f"{i * step:g}", "small", "middle")
    svg.text((left + right) / 2, base + 33, axis, "small", "middle")
    for i, (name, values) in enumerate(rows):
        x, y = left, top + room * i
        svg.text(left - 8, y + 14, name, "", "end")
        for part, value in values:
            svg.bar(x, y, value * scale, room - 12, colour[part], f"{name}, {part}: {value:.1f}")
            if value * scale > 34:
                svg.parts.append(f'<text class="small" x="{x + value * scale / 2:.1f}" y="{y + 14:.1f}" '
                                 f'text-anchor="middle" style="fill:#fff">{value:.0f}</text>')
            x += value * scale
        svg.text(x + 6, y + 14, f"{sum(v for _, v in values):.0f}", "small")
    return svg.done()


# Tables.

def of_other_commits(results, rows, name):
    """Lines that say which of the rows an earlier run left, by name(row)."""
    by_commit = {}
    for row in rows:
        by_commit.setdefault(row.get("commit", "not noted"), []).append(name(row))
    return [f"{len(names)} of {len(rows)} rows were measured at commit {commit}: {', '.join(sorted(set(names)))}."
            for commit, names in sorted(by_commit.items()) if commit != results["commit"]]


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(row) + " |" for row in rows]


def times(x):
    return "-" if x is None else f"{x:.2f}x"


def us(row):
    return "-" if row is None else f"{row['median_us']:.0f}" if row["median_us"] >= 1000 else f"{row['median_us']:.1f}"


class Results:
    """The rows, by what they are about. Looks them up as bench/run_cuda.py does for the summary."""

    def __init__(self, results):
        import run_cuda  # it imports this file
        self.all = results
        self.run = run_cuda

    def ours(self, op, shape, direction, policy="recompute", **more):
        return self.run.rewy_find(self.all, op, shape, direction, policy, **more)

    def theirs(self, op, shape, direction, policy="recompute", safe=False, value_heads=None):
        """The row, also where FLA refused."""
        for row in self.all.get("fla", {}).get("rows", []):
            if (row["op"] == op and (row["B"], row["T"], row["H"]) == shape and row["HV"] == (value_heads or row["H"])
                    and row["direction"] == direction and row["policy"] == policy and row["safe_gate"] == safe):
                return row
        return None

    def other(self, section, arch=None):
        """[(forward, backward)] of the problems of a section, in its order."""
        pairs = {}
        for row in self.all.get("rewy", {}).get("rows", []):
            if row["section"].startswith(section) and row.get("arch") == arch:
                if row["direction"] == "bwd" or not row["saved"]:
                    pairs.setdefault(row["problem"], {})[row["direction"]] = row
        return [(p.get("fwd"), p.get("bwd")) for p in pairs.values()]


def fla_us(row):
    if row is None:
        return "-"
    return "refused" if "refused" in row else us(row) + ("*" if row.get("unchecked") else "")


def ratio(ours, theirs):
    if ours is None or theirs is None or "refused" in theirs:
        return None
    return theirs["median_us"] / ours["median_us"]


def calls_of(op):
    return CALLS if op in ("kda", "gdn2") else CALLS[:2]


def against_fla(r, op, shapes, calls=CALLS):
    calls = [call for call in calls if call in calls_of(op)]
    rows = []
    for shape in shapes:
        cells = [shape_text(shape)]
        for _, direction, policy in calls:
            ours, theirs = r.ours(op, shape, direction, policy), r.theirs(op, shape, direction, policy)
            cells += [us(ours), fla_us(theirs), times(ratio(ours, theirs))]
        if any(cell != "-" for cell in cells[1:]):
            rows.append(cells)
    if not rows:
        return []
    head = ["(B, T, H)"]
    for name, _, _ in calls:
        head += [name + ", us", "FLA", ""]
    return table(head, rows)


def pair_table(pairs, describe):
    rows = [[NAMES[(b or f)["op"]], describe(b or f), us(f), us(b), f"{b['peak_mib']:.0f}" if b else "-",
             f"{100 * b['fraction_of_floor']:.0f}%" if b else "-"] for f, b in pairs]
    return table(["operator", "problem", "forward us", "backward us", "backward peak MiB", "backward: floor / time"],
                 rows)


def render(results):
    """(the document's part, {file name: chart})"""
    r = Results(results)
    m, fla, summary = results["machine"], results.get("fla"), results["summary"]
    gpu = m.get("gpu") or "GPU"
    place = re.sub(r"[^a-z0-9]+", "-", re.sub(r"^NVIDIA ", "", gpu).lower()).strip("-")
    bars = shape_text((1, 8192, 16))
    floor = results["floor"]
    calls, l2 = m.get("calls_a_graph", 2), m.get("l2_state", "unknown")
    lines = [f"{gpu}, driver {m.get('driver')}, CUDA {m.get('toolkit')}, {results['date']}, commit {results['commit']}. "
             f"Command: `{results['command']}`. BF16, K = V = 128, mild gates (log sigmoid(x) / 16), "
             f"initial state and final state's gradient given. Medians of replays of CUDA graphs with {calls} calls; L2 "
             f"cache {l2}."]
    if fla:
        v = fla["versions"]
        lines.append(f"FLA: fla-core {v.get('fla-core')}, torch {v.get('torch')}, Triton {v.get('triton')}; its kernels' "
                     f"configurations: {fla['tuning']}.")
        if fla["command"] != results["command"]:
            lines.append(f"FLA's side was measured by `{fla['command']}`, {fla['date']}.")
        if any(row.get("unchecked") for row in fla["rows"]):
            lines.append("Times marked * are of an operator that FLA refuses to run with this Triton version, because the "
                         "gradients would be wrong; its check was taken out for the timing (`--fla-times-only`).")
    lines += results.get("rewy", {}).get("notes", [])

    figures = {}
    if any(value is not None for one in summary.values() for value in one.values()):
        lines += ["", "### Speed-up over FLA, geometric means of six shapes", ""]
        rows = []
        for op in OPERATORS:
            one = summary[op]
            at = one.get("min_shape_at")
            lowest = "-"
            if at:
                lowest = f"{times(one['min_shape'])}, {at['call'].replace('_', ', ')} {shape_text(at['shape'])}"
            rows.append([NAMES[op]] + [times(one.get(key)) for key in ("forward", "backward_recompute", "backward_saved",
                                                                      "backward_recompute_safe")] + [lowest])
        lines += table(["operator", "forward", "backward, recompute", "backward, saved", "backward, recompute, over "
                        "`safe_gate=True`", "lowest of one shape"], rows)
    panels = [(NAMES[op], [(shape_text(s), [ratio(r.ours(op, s, d, policy), r.theirs(op, s, d, policy))
                                            for _, d, policy in calls_of(op)] + [None] * (3 - len(calls_of(op))))
                           for s in SHAPES]) for op in OPERATORS]
    if any(v is not None for _, groups in panels for _, values in groups for v in values):
        figures[f"{place}-speedup.svg"] = grouped_bars(
            f"Speed-up over FLA on {gpu}", [name for name, _, _ in CALLS], panels, "FLA's time / rewy's",
            lambda x: f"{x:.1f}", mark=1)
        lines += ["", f"![Speed-up over FLA by operator and shape](figures/{place}-speedup.svg)"]
    for op in OPERATORS:
        part = against_fla(r, op, SHAPES)
        if part:
            lines += ["", f"### {NAMES[op]}", "", *part]

    rows = []
    for op in OPERATORS:
        b, s = r.ours(op, (1, 8192, 16), "bwd"), r.ours(op, (1, 8192, 16), "bwd", "save")
        t = r.theirs(op, (1, 8192, 16), "bwd")
        if b:
            mib = lambda row, key: f"{row[key] / 2**20:.0f}" if row else "-"
            rows.append([NAMES[op], f"{b['peak_mib']:.0f}", f"{t['peak_mib']:.0f}" if t and "peak_mib" in t else "-",
                         mib(b, "workspace_bytes"), mib(b, "saved_bytes"), f"{s['peak_mib']:.0f}" if s else "-",
                         mib(s, "saved_bytes")])
    if rows:
        lines += ["", f"### Memory of a backward, {bars}, MiB", "",
                  "Peaks are what a backward adds to its inputs and to what the forward left: workspace and gradients.", ""]
        lines += table(["operator", "recompute: peak", "FLA", "of it workspace", "kept by the forward", "saved: peak",
                        "kept by the forward"], rows)

    rows = []
    for op in OPERATORS:
        for name, direction, policy in CALLS:
            row = r.ours(op, (1, 8192, 16), direction, policy)
            if row:
                rows.append([NAMES[op], name, f"{row['bytes'] / 1e6:.0f}", f"{row['bytes_per_s'] / 1e12:.2f}",
                             f"{row['operations_per_s'] / 1e12:.0f}", f"{row['floor_us']:.0f}", us(row),
                             f"{100 * row['fraction_of_floor']:.0f}%"])
    if rows:
        lines += ["", f"### Distance to the floor, {bars}", "",
                  f"The floor is the time of the bytes that inputs, outputs and three passes of a backward must move, at "
                  f"{floor['bytes_per_s'] / 1e12:.2f} TB/s, or of the products at {floor['operations_per_s'] / 1e12:.0f} "
                  f"TFLOP/s, whichever is longer (`tools/floors.cpp`); both rates were measured on an {floor['of']}.", ""]
        lines += table(["operator", "call", "MB", "TB/s", "TFLOP/s", "floor us", "us", "floor / time"], rows)
    def share(op, shape, direction, policy):
        row = r.ours(op, shape, direction, policy)
        return row and 100 * row["fraction_of_floor"]
    panels = [(NAMES[op], [(shape_text(s), [share(op, s, d, policy) for _, d, policy in CALLS]) for s in SHAPES])
              for op in OPERATORS]
    if any(v is not None for _, groups in panels for _, values in groups for v in values):
        figures[f"{place}-floor.svg"] = grouped_bars(
            f"Distance to the floor of bytes and products on {gpu}: 100% is the floor", [name for name, _, _ in CALLS],
            panels, "floor / time, %", lambda x: f"{x:.0f}", mark=100)
        lines += ["", f"![Floor / time by operator and shape](figures/{place}-floor.svg)"]

    kernels = results.get("kernels")
    if kernels:
        rows = {}
        for row in kernels:
            rows.setdefault((row["op"], row["direction"]), []).append((row["kernel"], row["us"]))
        ordered = [(f"{NAMES[op]}, {'forward' if d == 'fwd' else 'backward'}", rows[op, d]) for op in OPERATORS
                   for d in ("fwd", "bwd") if (op, d) in rows]
        figures[f"{place}-kernels.svg"] = stacked_bars(f"Time by kernel on {gpu}, {bars}", ordered, "us")
        lines += ["", f"### Time by kernel, {bars}", "", f"![Time by kernel](figures/{place}-kernels.svg)", ""]
        lines += table(["call", "kernel", "us", "share"],
                       [[name, kernel, f"{value:.1f}", f"{100 * value / sum(v for _, v in values):.0f}%"]
                        for name, values in ordered for kernel, value in values])

    rows = [[NAMES[op], us(r.ours(op, (1, 8192, 16), "fwd")), us(r.ours(op, (1, 8192, 16), "fwd", gate="trained")),
             f"{summary[op]['trained_over_mild_forward']:.2f}", us(r.ours(op, (1, 8192, 16), "bwd")),
             us(r.ours(op, (1, 8192, 16), "bwd", gate="trained")), f"{summary[op]['trained_over_mild_backward']:.2f}"]
            for op in OPERATORS[1:] if summary[op].get("trained_over_mild_backward")
            and summary[op].get("trained_over_mild_forward")]
    if rows:
        lines += ["", f"### Trained gates against mild ones, {bars}", "",
                  "The gates of `examples/layers`, repeated to the length and heads.", ""]
        lines += table(["operator", "forward, mild, us", "trained", "ratio", "backward, mild, us", "trained", "ratio"],
                       rows)

    large = [(op, against_fla(r, op, LARGE, CALLS[:2])) for op in OPERATORS]
    if any(part for _, part in large):
        lines += ["", "### Larger shapes"]
        for op, part in large:
            lines += ["", f"{NAMES[op]}:", "", *part] if part else []
    grouped = [(f, b) for f, b in r.other("Production") if (b or f)["HV"] != (b or f)["H"]]
    if grouped:
        lines += ["", "### Grouped heads", ""]
        rows = []
        for f, b in grouped:
            row = b or f
            shape = row["B"], row["T"], row["H"]
            cells = [NAMES[row["op"]], f"({row['B']}, {row['T']}), {row['H']} query and {row['HV']} value heads"]
            for direction, ours in (("fwd", f), ("bwd", b)):
                theirs = r.theirs(row["op"], shape, direction, value_heads=row["HV"])
                cells += [us(ours), fla_us(theirs), times(ratio(ours, theirs))]
            rows.append(cells)
        lines += table(["operator", "problem", "forward us", "FLA", "", "backward us", "FLA", ""], rows)
    at = lambda row: shape_text((row["B"], row["T"], row["H"]))
    for section, title, describe in (
            ("Other widths", "Other widths", lambda row: f"{at(row)}, K = V = {row['K']}"),
            ("Packed", "Packed sequences", lambda row: f"{row['packed'].replace(',', ' + ')} tokens, {row['H']} heads")):
        pairs = r.other(section)
        if pairs:
            lines += ["", f"### {title}", "", *pair_table(pairs, describe)]
    portable = r.other("The six shapes", "80")
    if portable:
        lines += ["", "### The kernels of compute capability 8.0, on the same GPU", "",
                  "What a GPU without kernels of its own runs; `rewy bench --arch 80` chooses it anywhere.", ""]
        rows = []
        for f, b in portable:
            row = b or f
            cells = [NAMES[row["op"]], at(row)]
            for direction, x in (("fwd", f), ("bwd", b)):
                best = r.ours(row["op"], (row["B"], row["T"], row["H"]), direction)
                cells += [us(x), f"{x['median_us'] / best['median_us']:.2f}" if best and x else "-"]
            rows.append(cells)
        lines += table(["operator", "(B, T, H)", "forward us", "of the default's", "backward us", "of the default's"],
                       rows)
    return "\n".join(lines) + "\n", figures


def write(text, figures, document, folder, begin=BEGIN, end=END):
    """Puts the text between the document's markers and the charts into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in figures.items():
        (folder / name).write_text(svg)
    here = os.path.relpath(folder, document.resolve().parent)
    text = text.replace("](figures/", f"]({here}/")
    old = document.read_text()
    pattern = re.escape(begin) + ".*" + re.escape(end)
    if not re.search(pattern, old, flags=re.S):
        raise SystemExit(f"{document} has no {begin} ... {end}")
    document.write_text(re.sub(pattern, lambda _: f"{begin}\n{text}{end}", old, flags=re.S))
