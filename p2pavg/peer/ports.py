"""The ports of a peer: TCP for links and UDP for the table, on one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from p2pavg.errors import AddressInUseError, UnreachableError
from p2pavg.identity import Identity
from p2pavg.membership import DHT
from p2pavg.peer import advice
from p2pavg.peer.settings import Settings
from p2pavg.transport.engine import Engine
from p2pavg.transport.links.endpoint import Endpoint, EndpointEvents
from p2pavg.transport.links.handshake import Party
from p2pavg.transport.paths import Paths, usual_file

PORTS_TRIED = 64


async def open_ports(
    settings: Settings,
    identity: Identity,
    engine: Engine,
    events: EndpointEvents,
    vet: Callable[[Mapping[str, Any]], None],
) -> tuple[Endpoint, DHT]:
    """Open the TCP and the UDP port on the number that the settings name, or on the next number that is free
    for both, where that is the default. vet: as in `Endpoint.start`. Raises P2PAvgError with what to do.
    """
    hello: dict[str, Any] = {
        "schema": b"",
        "role": "watcher",
        "client_only": bool(settings.client_only),
        "region": settings.region or "",
    }
    host, asked = settings.bind
    port = asked
    for attempt in range(PORTS_TRIED):
        endpoint = await Endpoint.start(
            identity,
            run_id=settings.run_id,
            listen_host=host,
            listen_port=port,
            port_is_default=settings.port_is_default,
            engine=engine,
            hello=hello,
            streams=settings.streams_per_link,
            events=events,
            credentials=settings.membership,
            vet=vet,
            paths=Paths(usual_file()),
        )
        try:
            dht = await DHT.start(
                identity,
                host=host,
                port=endpoint.port,
                initial_peers=settings.initial_addresses,
                client_only=bool(settings.client_only),
                dial=endpoint.dial,
                attach=endpoint.attach,
            )
            return endpoint, dht
        except AddressInUseError:
            taken = endpoint.port
            await endpoint.close()
            if attempt == PORTS_TRIED - 1 or not (settings.port_is_default or asked == 0):
                raise
            port = 0 if asked == 0 else taken + 1
        except UnreachableError as error:
            await endpoint.close()
            party = Party.of(settings.run_id, closed=settings.membership is not None)
            raise await advice.silent(settings.initial_addresses, party, error) from None
        except BaseException:
            await endpoint.close()
            raise
    raise AssertionError("the last attempt returns or raises")
