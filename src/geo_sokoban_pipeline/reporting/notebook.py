"""Displays for notebooks: the parts of the report, one call each, in light colours.

Each function takes data as the catalog loads them and returns an object that Jupyter shows. Nothing needs JavaScript,
so statically rendered notebooks show the outputs too.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from PIL import Image

from geo_sokoban_pipeline.envs.images import png_data_uri
from geo_sokoban_pipeline.formats import find_stale, signed
from geo_sokoban_pipeline.grpo.scoring import credit_turns
from geo_sokoban_pipeline.reporting import curves
from geo_sokoban_pipeline.reporting.charts import Chart
from geo_sokoban_pipeline.reporting.episodes import (
    Frame,
    TokenTexts,
    describe_end,
    episode_frames,
    episodes_gif,
    token_turns,
)
from geo_sokoban_pipeline.reporting.facts import describe_evaluated
from geo_sokoban_pipeline.reporting.pages import make_environment, read_asset
from geo_sokoban_pipeline.reporting.report_tables import difficulty_chart, read_evaluation
from geo_sokoban_pipeline.runs.folders import OUTPUTS
from geo_sokoban_pipeline.runs.provenance import suggest_command
from geo_sokoban_pipeline.tasks import TASKS, task_or_plain
from geo_sokoban_pipeline.trajectories.schema import read_context
from geo_sokoban_pipeline.trajectories.types import Trajectory, table_to_trajectories

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from kedro.io import DataCatalog

_BLUE, _RED = "37,99,235", "220,38,38"
_BOX = Markup(
    '<div class="gsp" style="background:var(--paper);padding:1rem;font:15px/1.5 system-ui,sans-serif">'
    "<style>{}</style>{}</div>"
)


def open_catalog(env: str | None = None, run_id: str = "default", folder: Path | None = None) -> DataCatalog:
    """The project's catalog, as `%load_ext kedro.ipython` gives it, for one environment and one run id.

    Args:
        env: configuration environment; None: the value of `GEO_SOKOBAN_ENV`, else Kedro's own default.
        run_id: run id of the entries.
        folder: the project or a folder in it; None: the working directory.

    Returns:
        A catalog whose `load` raises a `NotStoredError` where the command that makes the entry has not run.

    Raises:
        ValueError: the folder is in no Kedro project.
    """
    from kedro.utils import find_kedro_project

    start = folder or Path.cwd()
    if (project := find_kedro_project(start)) is None:
        raise ValueError(f"{start} is in no Kedro project; open the notebook from the project's notebooks folder")
    # Kedro reads this on its first import; its default is relative to the working directory, which is not the project.
    os.environ.setdefault("KEDRO_LOGGING_CONFIG", str(project / "conf" / "logging.yml"))
    from kedro.framework.session import KedroSession
    from kedro.framework.startup import bootstrap_project

    bootstrap_project(project)
    env = env or os.environ.get("GEO_SOKOBAN_ENV")
    session: Any = KedroSession.create(project, env=env, runtime_params={"run_id": run_id})
    catalog: DataCatalog = session.load_context().catalog
    session.close()
    catalog.load = partial(_load, catalog, run_id, env)  # type: ignore[method-assign]
    return catalog


class NotStoredError(ValueError):
    """A notebook loads a dataset that is not made yet; the message names the command. IPython shows it alone."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def _load(catalog: DataCatalog, run_id: str, env: str | None, name: str, *arguments: Any) -> Any:
    from kedro.io import DatasetError

    try:
        return type(catalog).load(catalog, name, *arguments)
    except DatasetError as error:
        run, root = name.partition(".")[0], type(catalog).load(catalog, "runs").root
        settings = catalog.config_resolver.resolve_pattern(name) or {}
        path = Path(settings.get("path") or settings.get("filepath") or root)
        if path.exists() or "_" not in run and run not in TASKS:
            raise
        what, command, found = name, suggest_command(f"data_{run}", env=env), []
        if run not in TASKS:
            what, command = f"{name} of run id {run_id}", suggest_command(run, run_id, env=env)
            found = [one.name for one in (root / OUTPUTS).glob(f"{run}/*") if one.is_dir() and one.name != run_id]
        others = f" Run ids of {run} that are stored: {', '.join(sorted(found))}." if found else ""
        raise NotStoredError(f"{what} is not stored in {root}. {command} makes it.{others}") from error


def first_policy(index: pd.DataFrame) -> pd.DataFrame:
    """Validation and evaluation episodes of a run's first policy, under the numbers of its last one.

    So one run is compared with itself as two runs are: by `split`, `task_id`, `policy_version` and `iteration`.
    """
    import pandas as pd

    moved = []
    for split, number in (("validation", "policy_version"), ("evaluation", "iteration")):
        episodes = index[index["split"] == split]
        first = episodes[episodes[number] == episodes[number].min()]
        moved.append(first.assign(**{number: episodes[number].max()}))
    return pd.concat(moved)


def load_newest(parts: Mapping[str, Callable[[], pa.Table]]) -> list[Trajectory]:
    """Episodes of the newest iteration among the partitions that the catalog loaded.

    Raises:
        ValueError: there is none.
    """
    if not parts:
        raise ValueError(
            "there are no stored episodes; run the pipeline first, or check RUN, RUN_ID and the environment"
        )
    newest = list(parts)[-1].split("/")[0]
    return [
        episode for name, read in parts.items() if name.startswith(newest) for episode in table_to_trajectories(read())
    ]


def largest_advantage(episode: Trajectory) -> float:
    """Largest magnitude among the advantages of an episode's turns; of the episode if its turns have none."""
    of_turns = [abs(turn.advantage) for turn in episode.turns if turn.advantage is not None]
    return max(of_turns, default=abs(episode.advantage or 0.0))


def read_image_pad_id(parts: Mapping[str, Callable[[], pa.Table]]) -> int:
    """Id of the token that stands for images, from the metadata of the newest partition."""
    return read_context(parts[list(parts)[-1]]().schema).image_pad_id


def folder_of(catalog: DataCatalog, name: str) -> Path:
    """Folder of a catalog entry, for tools that read its files themselves."""
    return Path(catalog.config_resolver.resolve_pattern(name)["path"])


def show_curves(metrics: Sequence[Mapping[str, Any]]) -> Any:
    """Success and reward by iteration, then the training diagnostics."""
    rows = [dict(row) for row in metrics]
    # Rows do not name their task; a chart appears where its metric was recorded.
    further = dict.fromkeys(curve for task in TASKS.values() for curve in task.report.curves)
    large = [curves.success_chart(rows, task_or_plain(None).words), curves.reward_chart(rows)]
    return _html(_plots(large), _plots(curves.health_charts(rows, further), small=True))


def show_evaluation(summary: Mapping[str, Any], stored: int = 0) -> Any:
    """Rates of policies and baselines with 95 % intervals, what they are of, and a chart by difficulty if that is a
    number.

    Args:
        stored: iterations of the run; 0: not known. An evaluation of an earlier checkpoint is called one.
    """
    tables, solved = read_evaluation(summary), task_or_plain(summary.get("task")).words.solved
    table = _parts().evaluation(tables.rows, tables.powers, tables.columns, solved)
    named = "; ".join(f"{name}: {value}" for name, value in describe_evaluated(summary))
    if stale := find_stale(summary, stored):
        named = f"The evaluation is of {stale}. {named}"
    return _html(table, Markup('<p class="quiet">{}</p>').format(named), _plots([difficulty_chart(summary)]))


def show_boards(episode: Trajectory, reward_args: Mapping[str, Any] | None = None) -> Any:
    """Every image of an episode with the response to it and its part of the reward, and the end with the reward.

    Args:
        reward_args: `reward.args` of the run, with which the environment's rewards of an evaluation's turns and what
            the end was worth become parts of the reward; None: those of the reward's own defaults. Where the parts do
            not add up to the reward, only the reward is shown.
    """
    if all(turn.credit is None for turn in episode.turns) and any(turn.reward is not None for turn in episode.turns):
        task, plain = task_or_plain(episode.task), [replace(turn, reward=None) for turn in episode.turns]
        episode = credit_turns(episode, task, reward_args or {}) or replace(episode, turns=plain)
    reward = "" if episode.reward is None else f" Reward {signed(episode.reward)}"
    end = f"{describe_end(episode)}{reward}"
    figures = [_figure(frame, end) for frame in episode_frames(episode)]
    return _html(Markup('<div class="strip">{}</div>').format(Markup("").join(figures)))


def show_film(episode: Trajectory, board_px: int = 240) -> Any:
    """The episode as an animated image."""
    film = base64.b64encode(episodes_gif([episode], board_px=board_px)).decode("ascii")
    return _html(Markup('<img alt="{}" src="data:image/gif;base64,{}">').format(describe_end(episode), film))


def show_tokens(episode: Trajectory, image_pad_id: int, texts: TokenTexts | None = None) -> Any:
    """All tokens of an episode: blue ones were sampled and trained, the darker the likelier, with reward and advantage.

    Args:
        texts: see `episodes.read_token_texts`; None shows ids.
    """
    return _html(_parts().tokens(token_turns(episode, image_pad_id, texts)))


def show_images(images: Sequence[bytes | str | Image.Image], captions: Sequence[str] = ()) -> Any:
    """Images side by side with their captions.

    Args:
        images: PNG bytes, data URIs as in the prompts, or images of Pillow.
    """
    shown = Markup('<figure style="width:14em"><img alt="" src="{}"><figcaption>{}</figcaption></figure>')
    figures = [shown.format(_uri(image), text) for image, text in zip_longest(images, captions, fillvalue="")]
    return _html(Markup('<div class="strip">{}</div>').format(Markup("").join(figures)))


def show_scores(tokens: pd.DataFrame, column: str = "image_reliance") -> Any:
    """The sampled tokens of an episode, turn by turn, shaded by a column of `token_scores`: blue above 0, red below.

    Args:
        tokens: rows of one episode.
    """
    values = tokens[column].astype(float)
    largest = float(values.abs().max()) or 1.0
    token = Markup('<span title="{}" style="background:rgba({},{:.2f});white-space:pre-wrap">{}</span>')
    lines = []
    for turn, rows in tokens.assign(value=values).groupby("turn", sort=True):
        pieces = [
            token.format(
                f"{row.value:+.3f}", _BLUE if row.value > 0 else _RED, 0.6 * abs(row.value) / largest, row.token
            )
            for row in rows.itertuples()
        ]
        lines.append(Markup('<p><span class="quiet">turn {}</span> {}</p>').format(turn, Markup("").join(pieces)))
    return _html(Markup("").join(lines))


def draw_occlusion(image: bytes, parts: pd.DataFrame, width: int = 320) -> Image.Image:
    """An image with its occlusion map on it: blue where the responses need a part, red where it misleads them.

    Args:
        image: PNG bytes.
        parts: rows of `occlusion` of this image.
        width: pixels of the result.
    """
    with Image.open(io.BytesIO(image)) as opened:
        shown = opened.convert("L").convert("RGB")  # the colours are those of the map
    scale = width / shown.width
    shown = shown.resize((width, round(shown.height * scale)), Image.Resampling.NEAREST)
    largest = float(parts["drop"].abs().max()) or 1.0
    for part in parts.itertuples():
        corners = (part.left, part.top, part.left + part.width, part.top + part.height)
        box = tuple(round(scale * corner) for corner in corners)
        colour = _BLUE if part.drop > 0 else _RED
        layer = Image.new("RGB", (box[2] - box[0], box[3] - box[1]), f"rgb({colour})")
        shown.paste(Image.blend(shown.crop(box), layer, 0.8 * abs(part.drop) / largest), box)
    return shown


def _uri(image: bytes | str | Image.Image) -> str:
    if isinstance(image, Image.Image):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")  # not `encode_png`: the image may be of any mode, and transparent
        image = buffer.getvalue()
    return png_data_uri(image) if isinstance(image, bytes) else image


def _figure(frame: Frame, end: str) -> Markup:
    image = Markup("")
    if frame.image is not None:
        image = Markup('<img alt="image in the observation" src="{}">').format(png_data_uri(frame.image))
    caption = Markup("<strong>{}</strong>").format(end)
    if frame.response is not None:
        reward = "" if frame.reward is None else f"reward {signed(frame.reward)}"
        caption = Markup('<code>{}</code> <span class="quiet">{}</span>').format(frame.response, reward)
    return Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(image, caption)


def _plots(charts: Sequence[Chart | None], small: bool = False) -> Markup:
    drawn = [_parts().chart(chart, legend=not small) for chart in charts if chart is not None]
    return Markup('<div class="plots{}">{}</div>').format(" small" if small else "", Markup("").join(drawn))


def _parts() -> Any:
    """The macros of the report."""
    return make_environment().get_template("parts.html.j2").module


def _html(*pieces: Markup) -> Any:
    from IPython.display import HTML

    return HTML(str(_BOX.format(Markup(read_asset("parts.css")), Markup("").join(pieces))))
