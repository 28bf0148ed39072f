"""The curves of runs as charts of Bokeh: those of one group are drawn side by side, all have the
same horizontal axis, which a page's controls choose, and a run has the same colour everywhere.
"""

from collections.abc import Sequence

import numpy as np
from bokeh.document import Document
from bokeh.models import (
    BasicTickFormatter,
    ColumnDataSource,
    CustomJS,
    DataRange1d,
    GlyphRenderer,
    HoverTool,
    Legend,
    LegendItem,
    NumeralTickFormatter,
    RadioButtonGroup,
    Slider,
)
from bokeh.palettes import Category10_10, Category20_20
from bokeh.plotting import figure

from vit_jax.errors import printable
from vit_jax.report import curves
from vit_jax.report.curves import Chart
from vit_jax.report.run import Run
from vit_jax.report.series import Series

FEW_POINTS = 30  # which are marked, too
MOST_LEGENDS = 10  # runs
LONGEST_NAME = 36  # characters of a run
HEIGHT = 250  # pixels, without the legend
LEGEND_ROW = 18  # pixels
NARROWEST = 330  # pixels of a chart, on a phone

FONT = "system-ui, sans-serif"
AXIS_STYLE = dict(
    axis_line_color="#999999",
    major_tick_line_color="#999999",
    minor_tick_line_color=None,
    axis_label_text_font=FONT,
    axis_label_text_font_style="normal",
    axis_label_text_font_size="12px",
    axis_label_text_color="#555555",
    major_label_text_font=FONT,
    major_label_text_color="#555555",
)
LEGEND_STYLE = dict(
    click_policy="hide",
    location="top_left",
    orientation="horizontal",
    label_text_font=FONT,
    label_text_font_size="11px",
    border_line_color=None,
    padding=0,
    margin=4,
)

# What the controls do. They find the curves in the document: if they referred to all charts, Bokeh
# would need time in proportion to the square of their number.
CHOOSE_AXIS = """
const choice = axes[cb_obj.active];
for (const panel of cb_obj.document.roots()) {
  for (const renderer of panel.renderers ?? []) {
    const data = renderer.data_source.data;
    const factor = choice.factors[renderer.tags[0]];
    data[choice.name] ??= data[choice.column].map((x) => x * factor);
    renderer.glyph.x = {field: choice.name};
  }
  if (panel.renderers === undefined) continue;
  panel.below[0].axis_label = choice.label;
  const hover = panel.toolbar.tools.find((tool) => tool.tooltips !== undefined);
  hover.tooltips = choice.tooltip;
}
x_range.reset();
"""
SMOOTH = """
const weight = cb_obj.value;
for (const panel of cb_obj.document.roots()) {
  for (const renderer of panel.renderers ?? []) {
    if (renderer.tags[1] == "faint") renderer.glyph.line_alpha = weight > 0 ? 0.25 : 0;
    if (renderer.tags[1] != "curve") continue;
    const data = renderer.data_source.data;
    let sum = 0;
    let total = 0;
    data.smooth = data.value.map((x) => {
      if (!isFinite(x)) return x;
      sum = weight * sum + (1 - weight) * x;
      total = weight * total + (1 - weight);
      return sum / total;
    });
    renderer.glyph.y = {field: weight > 0 ? "smooth" : "value"};
    renderer.data_source.change.emit();
  }
}
"""
SHOW_RUN = """
for (const panel of cb_obj.document.roots()) {
  for (const renderer of panel.renderers ?? []) {
    if (renderer.tags[0] == cb_obj.tags[0]) renderer.visible = cb_obj.visible;
  }
}
"""


def colour(number: int, count: int) -> str:
    palette = Category10_10 if count <= len(Category10_10) else Category20_20
    return palette[number % len(palette)]


class Drawing:
    """All charts of a page, which share their horizontal axis, and the controls."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = runs
        self.choice = curves.choose(runs)
        self.axes = curves.axes_of(runs)
        self.x_range = DataRange1d()
        self.show_run = CustomJS(code=SHOW_RUN)
        self.figures = [self.draw(chart) for chart in self.choice.charts]

    def draw(self, chart: Chart):
        """The chart of one metric."""
        panel = figure(
            height=HEIGHT,
            min_width=200,
            sizing_mode="stretch_width",
            x_range=self.x_range,
            y_axis_type="log" if chart.is_logarithmic else "linear",
            x_axis_label=self.axes[0].label,
            tools="pan,box_zoom,wheel_zoom,reset,save",
            active_drag="box_zoom",
            active_scroll=None,
            toolbar_location="above",
        )
        style(panel)
        drawn = {i: self.draw_curve(panel, i, curve) for i, curve in chart.curves.items()}
        self.add_hover(panel, [renderers[0] for renderers in drawn.values()])
        if 1 < len(self.runs) <= MOST_LEGENDS:
            items = [LegendItem(label=self.name(i), renderers=drawn[i]) for i in drawn]
            legend = Legend(items=items, ncols=self.legend_columns(), **LEGEND_STYLE)
            panel.add_layout(legend, "below")
            panel.height += LEGEND_ROW * -(-len(items) // legend.ncols)
        return panel

    def name(self, index: int) -> str:
        label = printable(self.runs[index].label, "")
        half = LONGEST_NAME // 2  # labels may differ at either end
        return label if len(label) <= LONGEST_NAME else f"{label[:half]}...{label[-half:]}"

    def legend_columns(self) -> int:
        """How many names stand side by side in the narrowest chart."""
        longest = max(len(self.name(i)) for i in range(len(self.runs)))
        return max(1, NARROWEST // (35 + 7 * longest))

    def unknown(self) -> list[str]:
        """For every axis that does not suit all runs, which these are."""
        lines = []
        for axis in self.axes:
            labels = [
                run.label
                for run, factor in zip(self.runs, axis.factors, strict=True)
                if not np.isfinite(factor)
            ]
            lines += [f"{axis.title}: {', '.join(labels[:10])}"] if labels else []
        return lines

    def draw_curve(self, panel, index: int, curve: Series) -> list[GlyphRenderer]:
        """The line of a run, a faint one for what is smoothed, and markers if it has few points."""
        columns = dict(step=curve.step, hours=curve.hours, value=curve.value)
        with np.errstate(over="ignore"):  # what is too large is infinite, and so a gap
            single = {name: column.astype(np.float32) for name, column in columns.items()}
        source = ColumnDataSource(single)
        options = dict(source=source, color=colour(index, len(self.runs)), name=self.name(index))
        faint = panel.line("step", "value", line_width=1, line_alpha=0, **options)
        line = panel.line("step", "value", line_width=1.8, **options)
        drawn = dict(curve=line, faint=faint)
        if len(curve.step) <= FEW_POINTS:
            drawn["marks"] = panel.scatter("step", "value", size=5, **options)
        for kind, renderer in drawn.items():
            renderer.tags = [index, kind]
            renderer.js_on_change("visible", self.show_run)
        return list(drawn.values())

    def add_hover(self, panel, lines: list[GlyphRenderer]) -> None:
        """Shows the values of all runs at the same place."""
        options = dict(mode="vline", line_policy="nearest", tooltips=self.axes[0].tooltip)
        panel.add_tools(HoverTool(renderers=lines, **options))

    def controls(self) -> list:
        """The choice of the horizontal axis, and the slider for smoothing."""
        choice = RadioButtonGroup(labels=[axis.title for axis in self.axes], active=0)
        axes = [vars(axis) | dict(tooltip=axis.tooltip) for axis in self.axes]
        choose_axis = CustomJS(args=dict(axes=axes, x_range=self.x_range), code=CHOOSE_AXIS)
        choice.js_on_change("active", choose_axis)
        slider = Slider(start=0, end=0.99, step=0.01, value=0, title="smoothing", width=220)
        slider.js_on_change("value", CustomJS(code=SMOOTH))
        return [choice, slider]


def document(models: Sequence) -> Document:
    """A document with these roots; Bokeh goes through all of them after each one that is added
    alone.
    """
    made = Document()
    with made.models.freeze():
        for model in models:
            made.add_root(model)
    return made


def style(panel) -> None:
    """A light chart in the font of the page."""
    panel.outline_line_color = None
    panel.grid.grid_line_color = "#e8e8e8"
    panel.toolbar.logo = None
    panel.toolbar.autohide = True
    panel.xaxis.formatter = NumeralTickFormatter(format="0.[000]a")
    if isinstance(panel.yaxis[0].formatter, BasicTickFormatter):
        panel.yaxis.formatter = BasicTickFormatter(power_limit_low=-4)
    for axis in panel.axis:
        axis.update(**AXIS_STYLE)
