"""The routes of the cluster pages: what the service answers, or the sentence why it does not.

A service that does not run is nothing that went wrong here: the answer is a page with its sentence, not a failure.
"""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse

from headway.dashboard.cluster_source import ClusterSource
from headway.errors import HeadwayError

Job = Annotated[str, Query(min_length=1, max_length=200)]


def add_cluster(app: FastAPI, source: ClusterSource, render: Callable[[Any], JSONResponse]) -> None:
    """Add what the cluster pages show."""

    def answer(ask: Callable[[], dict[str, Any]]) -> JSONResponse:
        try:
            return render(ask())
        except HeadwayError as error:
            return render({"problem": error.message, "hint": error.hint})

    @app.get("/api/cluster")
    def overview() -> JSONResponse:
        return answer(source.overview)

    @app.get("/api/cluster/job")
    def job(job: Job) -> JSONResponse:
        return answer(lambda: source.job(job))

    @app.get("/api/cluster/why")
    def why(job: Job) -> JSONResponse:
        return answer(lambda: source.why(job))

    @app.get("/api/cluster/timeline")
    def timeline() -> JSONResponse:
        return answer(source.timeline)
