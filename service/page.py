"""The status page: one HTML document, made on the server, no script, everything escaped."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from ..monitors.finding import Health
from ..monitors.verdict.verdict import Joined, Verdict
from .records import MitigationRecord, ScanRecord
from .schemas import BlockView, StatesView, StateView

_WORST_FIRST = (Health.FAILED, Health.UNKNOWN, Health.DEGRADED, Health.OK)
_WORDS = {
    Health.OK: "Healthy",
    Health.DEGRADED: "Degraded",
    Health.FAILED: "Corrupted",
    Health.UNKNOWN: "Not known",
}

_VERDICTS = {
    Verdict.OK: "Healthy",
    Verdict.MITIGATED: "Mitigated",
    Verdict.WEIGHT_FAULT: "Weight fault",
    Verdict.LATENT_WEIGHT_FAULT: "Latent weight fault",
    Verdict.OLD_FAULT: "Fault older than the baseline",
    Verdict.SERVING_FAULT: "Serving fault",
    Verdict.HUNG: "Hung",
    Verdict.UNKNOWN: "Not known",
}

_STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1c2330;--soft:#667085;--line:#e4e7ec;
--ok:#12805c;--degraded:#b26a00;--failed:#c4320a;--unknown:#667085;--bar:#5b8def}
@media(prefers-color-scheme:dark){:root{--bg:#12151b;--card:#1b2029;--ink:#e6e9ef;--soft:#98a2b3;--line:#2c3340;
--ok:#3ccb98;--degraded:#f5b14c;--failed:#ff7a59;--unknown:#98a2b3;--bar:#7aa5ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:62rem;margin:0 auto;padding:1.2rem}
header{display:flex;flex-wrap:wrap;gap:.3rem 1rem;align-items:baseline;margin-bottom:1rem}
h1{font-size:1.1rem;margin:0}h2{font-size:1rem;margin:0 0 .6rem}
.soft{color:var(--soft)}nav a{color:inherit;margin-right:.8rem}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1rem;margin-bottom:1rem}
.verdict{border-left:6px solid var(--c)}.verdict strong{color:var(--c);font-size:1.4rem}
.verdict p{margin:.3rem 0 0;overflow-wrap:anywhere}
.ok{--c:var(--ok)}.degraded{--c:var(--degraded)}.failed{--c:var(--failed)}.unknown{--c:var(--unknown)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--soft);text-align:left;font-size:.85rem}
th,td{padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}td.bar{min-width:7rem;width:34%}
.track{display:block;background:var(--line);border-radius:4px;height:.7rem;margin-top:.4rem;position:relative}
.fill{display:block;height:100%;border-radius:4px;background:var(--bar)}
.over .fill{background:var(--failed)}.tau{position:absolute;top:-3px;bottom:-3px;width:2px;background:var(--soft)}
tr.flagged td{font-weight:600;color:var(--failed)}tr.gated td{opacity:.6}
.wide{overflow-wrap:anywhere;min-width:12rem}
@media(max-width:40rem){.opt{display:none}main{padding:.6rem}section{padding:.8rem}}
"""


def render(
    states: StatesView,
    blocks: Sequence[BlockView],
    mitigations: Sequence[MitigationRecord],
    scans: Sequence[ScanRecord],
    *,
    tau: float,
    now: float,
) -> str:
    """The whole page.  `tau` is the z above which a block stands out, `now` epoch seconds."""
    name = escape(states.model_name or "no model yet")
    body = "".join(
        [
            f"<header><h1>Flipwatch</h1><span>{name}</span>"
            f'<span class="soft">{_at(now)} UTC</span>'
            '<nav class="soft"><a href="/v1/states">states</a><a href="/v1/blocks">blocks</a>'
            '<a href="/metrics">metrics</a><a href="/openapi.json">API</a></nav></header>',
            _joined(states.verdict),
            "".join(_verdict(state) for state in _worst_first(states.states)),
            f'<p class="soft">{escape(states.profile)}</p>',
            _alerts(states),
            _mitigations(states, mitigations),
            _blocks(blocks, tau),
            _scans(scans),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="refresh" content="10">'
        f"<title>Flipwatch: {name}</title><style>{_STYLE}</style></head><body><main>{body}</main></body></html>"
    )


def _joined(joined: Joined) -> str:
    return (
        f'<section class="verdict {joined.health.value}"><strong>{_VERDICTS[joined.verdict]}</strong> '
        f'<span class="soft">all evidence joined</span><p>{escape(joined.reason)}</p>'
        f"<p>{escape(joined.advice)}</p></section>"
    )


def _worst_first(states: Iterable[StateView]) -> list[StateView]:
    return sorted(states, key=lambda state: _WORST_FIRST.index(state.health))


def _verdict(state: StateView) -> str:
    seen = f"scan of {_at(state.at)} UTC" if state.at is not None else "no scan"
    return (
        f'<section class="verdict {state.health.value}"><strong>{_WORDS[state.health]}</strong> '
        f'<span class="soft">{escape(state.monitor)}, {seen}</span><p>{escape(state.reason)}</p></section>'
    )


def _alerts(states: StatesView) -> str:
    if not states.alerts:
        return ""
    rows = "".join(
        f"<tr><td>{escape(alert.name)}</td><td>{_at(alert.since)}</td>"
        f'<td class="wide">{escape(alert.summary)}: {escape(alert.description)}</td></tr>'
        for alert in states.alerts
    )
    return _table("Alerts that fire", "<th>alert</th><th>since</th><th>why</th>", rows)


def _mitigations(states: StatesView, mitigations: Sequence[MitigationRecord]) -> str:
    offer = states.mitigation
    reason = "" if offer.reason is None else f" {escape(offer.reason)}"
    note = f"Mode {escape(offer.mode)}.{reason} {escape(states.automation)}"
    rows = "".join(
        f"<tr><td>{_at(record.created_at)}</td><td>{record.action.value} "
        f"{escape(', '.join(map(str, record.blocks)))}</td><td>{record.state.value}</td>"
        f'<td class="wide">{escape(record.message)}</td></tr>'
        for record in mitigations
    )
    head = "<th>time</th><th>blocks</th><th>state</th><th>what</th>"
    return _table("Mitigations", head, rows, note)


def _blocks(blocks: Sequence[BlockView], tau: float) -> str:
    if not blocks:
        return ""
    known = [abs(block.skip_gain_z) for block in blocks if block.skip_gain_z is not None]
    # One extreme z must not flatten all the others, nor a quiet model look wild.
    full = min(max([2 * tau, *known]), 4 * tau)
    head = (
        '<th class="n">block</th><th class="n">gate</th><th>z of skip gain</th><th class="n">z</th>'
        '<th class="n">skip gain</th><th class="n">loss without</th>'
        '<th class="n opt">BSS z</th><th class="n opt">slope z</th>'
    )
    rows = "".join(_block(block, tau, full) for block in blocks)
    note = (
        "Skip gain: nats that the model wins without the block; loss without: what a skip would bring. A block is "
        f"flagged by its skip gain and the error of that; the mark at tau = {tau:g} only shows what stands out."
    )
    return _table("Blocks", head, rows, note)


def _block(block: BlockView, tau: float, full: float) -> str:
    z = block.skip_gain_z
    width = 0.0 if z is None else max(0.0, min(z / full, 1.0)) * 100
    over = " over" if z is not None and z > tau else ""
    kind = "flagged" if block.flagged else "gated" if block.gate is not None and block.gate != 1.0 else ""
    bar = (
        f'<span class="track{over}"><span class="fill" style="width:{width:.1f}%"></span>'
        f'<span class="tau" style="left:{min(tau / full, 1.0) * 100:.1f}%"></span></span>'
    )
    gate = "?" if block.gate is None else f"{block.gate:g}"
    return (
        f'<tr class="{kind}"><td class="n">{block.block}</td><td class="n">{gate}</td><td class="bar">{bar}</td>'
        f'<td class="n">{_number(z, 1)}</td><td class="n">{_number(block.skip_gain, 3)}</td>'
        f'<td class="n">{_number(block.loss_without_nats, 3)}</td>'
        f'<td class="n opt">{_number(block.bss_z, 1)}</td><td class="n opt">{_number(block.slope_z, 1)}</td></tr>'
    )


def _scans(scans: Sequence[ScanRecord]) -> str:
    rows = "".join(
        f"<tr><td>{_at(scan.created_at)}</td><td>{escape(scan.monitor)}</td><td>{scan.trigger.value}</td>"
        f"<td>{scan.state.value}</td>"
        f'<td class="n">{scan.steps_done}/{"?" if scan.steps_total is None else scan.steps_total}</td>'
        f'<td class="wide">{escape(scan.error or "")}</td></tr>'
        for scan in scans
    )
    head = '<th>time</th><th>monitor</th><th>why</th><th>state</th><th class="n">steps</th><th></th>'
    return _table("Last scans", head, rows)


def _table(title: str, head: str, rows: str, note: str = "") -> str:
    inner = (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        if rows
        else '<p class="soft">None.</p>'
    )
    return f"<section><h2>{title}</h2>{f'<p class=soft>{note}</p>' if note else ''}{inner}</section>"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _at(epoch: float) -> str:
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%d %H:%M:%S")
