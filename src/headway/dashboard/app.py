"""The dashboard's routes. Every answer is computed from files when it is asked for; only labels of runs are written."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event as StopEvent
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from headway import __version__
from headway.cluster.service.connection import ServiceConnection, connect
from headway.dashboard import rollouts, run_page, samples
from headway.dashboard.checkpoints import model_list
from headway.dashboard.cluster_routes import add_cluster
from headway.dashboard.cluster_source import ClusterSource
from headway.dashboard.comparison import comparison
from headway.dashboard.datasets import dataset_list, dataset_samples, folder_of
from headway.dashboard.documents import step_documents
from headway.dashboard.guard import Guard
from headway.dashboard.lineage import lineage_document, name_list
from headway.dashboard.live import changes
from headway.dashboard.recorded import RecordedRuns
from headway.dashboard.series import Plot, overlay, packed
from headway.dashboard.sheets import contact_sheet
from headway.errors import HeadwayError, RunError, UsageError
from headway.track.store import change_note, change_tags, read_labels, write_labels

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
MOST_RUNS = 200
"""Of one plot or comparison."""
MOST_BUCKETS = 4000

Run = Annotated[str, Query(max_length=200)]
RunNames = Annotated[list[str], Query(max_length=MOST_RUNS)]


class LabelChange(BaseModel):
    """What a page says that a run's labels are."""

    tags: Annotated[list[str], Field(max_length=50)]
    note: str


def make_app(
    root: Path,
    token: str,
    *,
    data: Path | None = None,
    host: str = "127.0.0.1",
    service: Callable[[], ServiceConnection] | None = None,
) -> FastAPI:
    """Return the application that shows the runs of a folder to those who have the token.

    Its `state.stopping` is to be set when the server stops, so that streams end. `service` connects to the cluster
    service that is shown; by default that of the same folder of runs.
    """
    app = FastAPI(title="Headway", openapi_url=None, docs_url=None, redoc_url=None, default_response_class=_Json)
    app.add_middleware(Guard, token=token, host=host)
    app.add_exception_handler(HeadwayError, _refused)  # type: ignore[arg-type]
    app.add_exception_handler(OSError, _gone)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http)  # type: ignore[arg-type]
    app.state.stopping = StopEvent()
    recorded = RecordedRuns(root)
    _add_runs(app, recorded)
    _add_files(app, recorded)
    _add_others(app, recorded, data or Path("data"))
    add_cluster(app, ClusterSource(service or partial(connect, root), root), _Json)
    _add_pages(app, load_static())
    return app


def _add_runs(app: FastAPI, recorded: RecordedRuns) -> None:
    """Add what the lists of runs, plots and comparisons show."""

    @app.get("/api/runs")
    def runs(where: Annotated[str, Query(max_length=2000)] = "", archived: bool = False) -> _Json:
        problem = None
        try:
            rows = recorded.select(where.strip())
        except UsageError as error:  # a query that is being typed
            rows, problem = recorded.rows(), error.message if error.hint is None else f"{error.message}\n{error.hint}"
        shown = [row for row in rows if archived or not row["archived"]]
        facts = {"root": str(recorded.root), "version": __version__, "problem": problem}
        return _Json({"runs": shown, "hidden": len(rows) - len(shown), **facts})

    @app.get("/api/run")
    def run(run: Run) -> _Json:
        return _Json(run_page.overview(recorded, recorded.find(run), run))

    @app.get("/api/ledger")
    def ledger(run: Run) -> _Json:
        return _Json(run_page.ledger_document(recorded, recorded.find(run)))

    @app.get("/api/recipe")
    def recipe(run: Run) -> _Json:
        return _Json(run_page.recipe_document(recorded, recorded.find(run)))

    @app.get("/api/series")
    def series(
        run: RunNames,
        key: Annotated[list[str], Query(max_length=64)],
        buckets: Annotated[int, Query(ge=10, le=MOST_BUCKETS)] = 600,
        first: int | None = None,
        last: int | None = None,
    ) -> Response:
        late = recorded.prepare(run)
        ready = [name for name in run if name not in late]
        plots = {name: read_plot(recorded, ready, name, buckets, first, last) for name in dict.fromkeys(key)}
        return Response(packed(plots, late), media_type="application/octet-stream")

    @app.post("/api/labels")
    def labels(run: Run, change: LabelChange) -> _Json:
        folder = recorded.find(run)
        before = read_labels(folder)
        after = change_tags(before, add=change.tags, remove=set(before.tags) - set(change.tags))
        write_labels(folder, change_note(after, change.note))
        return _Json(asdict(read_labels(folder)))

    @app.get("/api/compare")
    def compare(run: RunNames) -> _Json:
        return _Json(comparison(recorded, list(dict.fromkeys(run))))

    @app.get("/api/live")
    async def live(run: Run | None = None) -> StreamingResponse:
        stream = changes(recorded, run, app.state.stopping)
        return StreamingResponse(stream, media_type="text/event-stream")


def read_plot(
    recorded: RecordedRuns, names: list[str], key: str, buckets: int, first: int | None, last: int | None
) -> Plot:
    """Return a metric of several runs; a run that is gone or lacks the metric is left out."""
    if first is not None and last is not None:  # a little more, so that lines go to the edges
        margin = 2 + (last - first) // 10
        first, last = max(0, first - margin), last + margin
    return overlay(recorded.series(names, key, buckets, first, last))


def _add_files(app: FastAPI, recorded: RecordedRuns) -> None:
    """Add logs, stacks, samples and rollouts: files in a run's folder."""

    @app.get("/api/logs")
    def logs(run: Run, file: str | None = None, offset: Annotated[int | None, Query(ge=0)] = None) -> _Json:
        folder = recorded.find(run)
        if file is None:
            return _Json({"files": run_page.log_files(folder)})
        return _Json(run_page.read_log(folder, file, offset))

    @app.get("/api/stacks")
    def stacks(run: Run, file: str | None = None) -> _Json:
        folder = recorded.find(run)
        return _Json(run_page.stack_files(folder) if file is None else run_page.read_stack(folder, file))

    @app.get("/api/samples")
    def sample_list(run: Run) -> _Json:
        return _Json({"files": samples.sample_files(recorded.find(run))})

    @app.get("/api/sample-text")
    def sample_text(run: Run, path: str) -> _Json:
        return _Json(samples.sample_text(samples.sample_path(recorded.find(run), path)[0]))

    @app.get("/api/evaluation")
    def evaluation(run: Run, key: str, step: int | None = None) -> _Json:
        return _Json({"rows": samples.evaluation_rows(recorded.find(run), key, step)})

    @app.get("/files")
    def files(run: Run, path: str) -> FileResponse:
        file, media_type = samples.sample_path(recorded.find(run), path)
        # Whatever a browser takes a sample for, it may do nothing.
        policy = {"content-security-policy": "default-src 'none'; sandbox"}
        return FileResponse(file, media_type=media_type, headers=policy)

    @app.get("/api/documents")
    def documents(run: Run, step: Annotated[int, Query(ge=1)], first: Annotated[int, Query(ge=0)] = 0) -> _Json:
        return _Json(step_documents(recorded.find(run), step, first))

    @app.get("/api/rollouts")
    def rollout_page(
        run: Run, step: Annotated[int | None, Query(ge=0)] = None, first: Annotated[int, Query(ge=0)] = 0
    ) -> _Json:
        folder = recorded.find(run)
        return _Json(rollouts.batch_list(folder) if step is None else rollouts.batch_page(folder, step, first))


def _add_others(app: FastAPI, recorded: RecordedRuns, data: Path) -> None:
    """Add datasets and models."""

    @app.get("/api/datasets")
    def datasets() -> _Json:
        return _Json({"datasets": dataset_list(recorded, data), "folder": str(data)})

    @app.get("/api/dataset")
    def dataset(id: Annotated[str, Query(max_length=32)], first: Annotated[int, Query(ge=0)] = 0) -> _Json:
        return _Json(dataset_samples(recorded, data, id, first))

    @app.get("/sheet")
    def sheet(id: Annotated[str, Query(max_length=32)], first: Annotated[int, Query(ge=0)] = 0) -> Response:
        return Response(contact_sheet(folder_of(recorded, data, id), first), media_type="image/png")

    @app.get("/api/models")
    def models() -> _Json:
        return _Json({"models": model_list(recorded), **name_list(recorded)})

    @app.get("/api/lineage")
    def lineage(of: Run) -> _Json:
        return _Json(lineage_document(recorded, of))


def _add_pages(app: FastAPI, static: dict[str, tuple[bytes, str]]) -> None:
    """Add the page and its scripts, from memory: no path reaches the disk."""

    @app.get("/static/{name}")
    def asset(name: str) -> Response:
        if name not in static:
            raise HTTPException(404, f"no file {name!r}")
        content, media_type = static[name]
        return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    @app.get("/{path:path}")
    def page(path: str) -> Response:
        if path.startswith(("api/", "files", "sheet")):
            raise HTTPException(404, f"no /{path}")
        content, media_type = static["index.html"]
        return Response(content, media_type=media_type)


def load_static(folder: Path = STATIC) -> dict[str, tuple[bytes, str]]:
    """Return the built files by name."""
    files = {path.name: (path.read_bytes(), TYPES[path.suffix]) for path in folder.glob("*") if path.suffix in TYPES}
    if "index.html" not in files:
        raise UsageError(
            f"{folder} has no index.html", hint="build it: npm ci && npm run build in src/headway/dashboard/app"
        )
    return files


class _Json(JSONResponse):
    """JSON of anything that Pydantic can write; numbers that JSON does not have are null."""

    def render(self, content: Any) -> bytes:
        return to_json(content, inf_nan_mode="null", fallback=str)


async def _refused(_: Request, error: HeadwayError) -> JSONResponse:
    status = 404 if isinstance(error, RunError) and error.usage else 400 if error.usage else 500
    return _Json({"error": error.message, "hint": error.hint}, status_code=status)


async def _gone(_: Request, error: OSError) -> JSONResponse:
    message = f"cannot read {Path(str(error.filename)).name if error.filename else 'a file'}: {error.strerror}"
    return _Json({"error": message, "hint": "the run may have been deleted or moved"}, status_code=404)


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    mistake = error.errors()[0]
    return _Json({"error": f"{mistake['loc'][-1]}: {mistake['msg']}", "hint": None}, status_code=400)


async def _http(_: Request, error: HTTPException) -> JSONResponse:
    return _Json({"error": str(error.detail), "hint": None}, status_code=error.status_code)
