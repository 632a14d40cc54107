"""The pages that speak of all servers behind one proxy: their models, counters and metrics."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from start_llm.core.chat import Json
from start_llm.core.errors import Overloaded
from start_llm.protocols.routes import Route
from start_llm.proxy.asgi import Send
from start_llm.proxy.backend import WholeAnswer
from start_llm.proxy.refusals import refuse, respond
from start_llm.proxy.routing_names import RoutedConversations
from start_llm.proxy.server_group import RoutedServer, ServerGroup, entries_of

_WITHIN_S = 10.0
_LABEL = "backend"
_SUMMED = ("computed_tokens", "reused_tokens", "unavoidable_tokens")

type Page = Callable[[Any, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class MergedPages:
    """Answers what no single server could."""

    group: ServerGroup
    conversations: RoutedConversations

    def find(self, route: Route) -> Page | None:
        """Return what answers this route, if its answer is about all servers."""
        pages: Mapping[str, Page] = {
            "GET /v1/models": self._models,
            "GET /stats": self._stats,
            "GET /metrics": self._metrics,
        }
        return pages.get(route.name)

    async def _models(self, scope: Any, send: Send) -> None:
        """Send one list of the models of all servers, in the form that the client asks for."""
        answered = await self._ask_all("/v1/models", scope)
        answers = [answer for _, answer in answered if answer is not None and entries_of(answer)]
        if not answers:
            await refuse(scope, send, Overloaded("No server behind this proxy takes requests now."))
            return
        entries: dict[str, Any] = {}
        for entry in (entry for answer in answers for entry in entries_of(answer)):
            entries.setdefault(entry["id"], entry)
        ids = [*entries]
        body = answers[0].fields | {"data": [*entries.values()]}
        ends = {"first_id": ids[0], "last_id": ids[-1]} if "first_id" in body else {}
        await _respond_json(send, body | ends)

    async def _stats(self, scope: Any, send: Send) -> None:
        """Send the counters of each server, and the sums of those that make up the efficiency."""
        answered = [
            (server, answer.fields if answer and answer.is_ok else {})
            for server, answer in await self._ask_all("/stats", scope)
        ]
        servers: list[Json] = [
            {"url": server.url, "state": server.state, "in_flight": server.in_flight, "stats": stats or None}
            for server, stats in answered
        ]
        await _respond_json(
            send,
            {
                "servers": servers,
                "known_prefixes": len(self.conversations),
                "prompt_cache": _summed(stats.get("prompt_cache") for _, stats in answered),
            },
        )

    async def _metrics(self, scope: Any, send: Send) -> None:
        """Send the metrics of all servers, each with the label of its server."""
        registry = CollectorRegistry()
        registry.register(_Merged(await self._ask_all("/metrics", scope)))
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        await respond(send, HTTPStatus.OK, headers, generate_latest(registry))

    async def _ask_all(self, path: str, scope: Any) -> list[tuple[RoutedServer, WholeAnswer | None]]:
        """Return what each server answers; None for those that take no requests."""

        async def answer_of(server: RoutedServer) -> WholeAnswer | None:
            if not server.is_able:
                return None
            return await server.backend.whole("GET", path, scope["headers"], within_s=_WITHIN_S)

        servers = self.group.servers
        return [*zip(servers, await asyncio.gather(*map(answer_of, servers)), strict=True)]


@dataclass(eq=False, slots=True)
class _Merged(Collector):
    """The metrics of several servers, by server."""

    answers: list[tuple[RoutedServer, WholeAnswer | None]]

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("start_llm_backend_up", "1: the server takes requests.", labels=[_LABEL])
        busy = GaugeMetricFamily("start_llm_backend_in_flight", "Requests of this proxy.", labels=[_LABEL])
        families: dict[str, Metric] = {}
        for server, answer in self.answers:
            up.add_metric([server.name], float(server.is_able))
            busy.add_metric([server.name], server.in_flight)
            for family in _families(answer):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, _LABEL: server.name})
                    for sample in family.samples
                ]
        yield from (up, busy, *families.values())


def _families(answer: WholeAnswer | None) -> Iterable[Metric]:
    return text_string_to_metric_families(answer.body.decode()) if answer and answer.is_ok else ()


def _summed(caches: Iterable[Any]) -> dict[str, Json]:
    counted = [cache for cache in caches if isinstance(cache, dict)]
    sums: dict[str, Any] = {name: sum(cache.get(name, 0) for cache in counted) for name in _SUMMED}
    computed, unavoidable = sums["computed_tokens"], sums["unavoidable_tokens"]
    return {**sums, "efficiency": round(unavoidable / computed, 4) if computed and unavoidable else None}


async def _respond_json(send: Send, body: Mapping[str, Json]) -> None:
    await respond(send, HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(body).encode())
