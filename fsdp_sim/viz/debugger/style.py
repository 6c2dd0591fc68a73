"""The look of the debugger: in JupyterLab that of its theme (its ``--jp-`` variables), elsewhere black on white."""

from __future__ import annotations

from fsdp_sim.viz import theme
from fsdp_sim.viz.debugger.sources import code_css

CSS = f"""
.fsd {{ --ink: var(--jp-content-font-color1, #1A1A1A); --soft: var(--jp-content-font-color2, #57606A);
  --paper: var(--jp-layout-color0, #FFFFFF); --band: var(--jp-cell-editor-background, #F3F5F7);
  --rule: var(--jp-border-color2, #D0D7DE); --mark: rgba(240, 180, 41, .26); --edge: #E69F00;
  color: var(--ink); font: 13px/1.45 {theme.FONT}; font-variant-numeric: tabular-nums;
  container-type: inline-size; }}
.fsd h3 {{ font-size: 17px; margin: 2px 0; font-weight: 650; display: flex; align-items: center; gap: 2px; }}
.fsd h4 {{ font-size: 12px; margin: 10px 0 4px; font-weight: 650; }}
.fsd section > h4:first-child {{ margin-top: 0; }}
.fsd p {{ margin: 3px 0; }}
.fsd-head p {{ font-size: 14.5px; max-width: 62em; min-height: 3em; margin: 4px 0 6px; }}
.fsd-where {{ color: var(--soft); font-weight: 400; font-size: 12px; }}
.fsd-grid {{ display: grid; grid-template-columns: repeat(6, 1fr); gap: 10px; margin-top: 8px; }}
.fsd-grid > section {{ grid-column: span 2; min-width: 0; border: 1px solid var(--rule); border-radius: 6px;
  padding: 9px 11px; background: var(--paper); overflow: hidden; }}
.fsd-grid > section.fsd-wide {{ grid-column: span 3; }}
@container (max-width: 920px) {{ .fsd .fsd-lane {{ display: none; }} }}
@container (max-width: 760px) {{ .fsd-grid > section, .fsd-grid > section.fsd-wide {{ grid-column: span 6; }} }}
.fsd table {{ border-collapse: collapse; width: 100%; font-size: 12px; table-layout: auto; }}
.fsd th {{ font-weight: 400; color: var(--soft); text-align: left; padding: 1px 6px; }}
.fsd td {{ padding: 1.5px 6px; text-align: left; vertical-align: top; border: 0; background: none; }}
.fsd tr, .fsd tbody tr:nth-child(even) {{ background: none; }}
.fsd td.fsd-clip {{ max-width: 0; width: 99%; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }}
.fsd .fsd-lane {{ white-space: nowrap; }}
.fsd .fsd-n {{ text-align: right; white-space: nowrap; }}
.fsd tr.fsd-memory td {{ color: var(--soft); }}
.fsd tr.fsd-here, .fsd tbody tr.fsd-here:nth-child(even) {{ background: var(--mark); }}
.fsd tr.fsd-here td:first-child {{ box-shadow: inset 3px 0 0 var(--edge); }}
.fsd tr.fsd-here td {{ font-weight: 600; }}
.fsd-sq {{ display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; flex: none;
  box-sizing: border-box; vertical-align: -1px; }}
.fsd h3 .fsd-sq {{ width: 14px; height: 14px; }}
.fsd-hatched {{ background-image: repeating-linear-gradient(45deg, rgba(255,255,255,.45) 0 2px, transparent 2px 5px); }}
.fsd-code {{ margin: 0; padding: 4px 0; overflow-x: auto; background: var(--band); border-radius: 4px;
  font: 11.5px/1.5 var(--jp-code-font-family, ui-monospace, Menlo, Consolas, monospace); }}
.fsd-code code {{ display: block; width: max-content; min-width: 100%; background: none; font: inherit;
  color: var(--ink); padding: 0; }}
.fsd-code code > span {{ display: block; white-space: pre; padding: 0 8px 0 5px; }}
.fsd-code code > span > i {{ font-style: normal; color: var(--soft); user-select: none; }}
.fsd-code .fsd-here {{ background: var(--mark); box-shadow: inset 3px 0 0 var(--edge); }}
.fsd details {{ margin-top: 8px; font-size: 12px; }}
.fsd summary {{ cursor: pointer; color: var(--soft); }}
.fsd ul, .fsd ol {{ margin: 2px 0; padding-left: 18px; }}
.fsd-bar {{ display: flex; height: 14px; border: 1px solid var(--rule); border-radius: 3px; overflow: hidden;
  margin: 2px 0 6px; }}
.fsd-bar > i {{ display: block; height: 100%; }}
.fsd-delta {{ color: var(--ink); margin-left: 4px; }}
.fsd-strip {{ display: flex; border: 1px solid var(--rule); border-radius: 6px; padding: 4px 8px;
  background: var(--paper); }}
.fsd-lanes {{ flex: none; width: 96px; }}
.fsd-lanes span {{ display: block; height: 20px; line-height: 20px; font-size: 11.5px; color: var(--soft); }}
.fsd-strip svg {{ flex: 1; min-width: 0; display: block; overflow: hidden; }}
.fsd-strip svg {{ font: 10px {theme.FONT}; }}
.fsd-word {{ fill: var(--soft); font-size: 11px; pointer-events: none; }}
.fsd-unit {{ pointer-events: none; }}
.fsd-phase {{ stroke: var(--rule); }}
.fsd-strip .fsd-veil {{ fill: var(--paper); opacity: .7; }}
.fsd-strip .fsd-waited {{ fill: none; stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 3 2; }}
.fsd-strip .fsd-now {{ fill: none; stroke: var(--ink); stroke-width: 2; }}
.fsd-strip .fsd-cursor {{ stroke: #D55E00; stroke-width: 1.5; }}
{code_css(".fsd-code")}
"""
STYLE = f"<style>{CSS}</style>"
