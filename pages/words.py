"""What no dataclass says of the wire: who sends what to whom and when, what the fields of structs mean."""

from __future__ import annotations

from collections.abc import Iterator

from p2pavg.membership.table import record, wire
from p2pavg.report import compact
from p2pavg.rounds.protocol import fields
from p2pavg.transport import frames
from p2pavg.transport.links import control, handshake

Rows = tuple[tuple[str, str], ...]

PREAMBLE: Rows = (
    ("magic", '`"P2PAVG"`'),
    ("major", "wire version; peers of different major versions refuse each other"),
    ("minor", "peers of different minor versions train together"),
    ("kind", "1: control connection, 2: data stream, 3: observes, 4: end of a tunnel"),
    ("closed", "1: the sender has credentials, and speaks with members only"),
    ("run", "the first bytes of SHA-256 of the run id"),
    ("crc", "CRC-32 of the 16 bytes before"),
)
HEAD: Rows = (
    ("length", "bytes of the msgpack map that follows"),
    ("crc", "CRC-32 of the map"),
    ("head_crc", "CRC-32 of the eight bytes before"),
)
HELLO = {
    "schema": "SHA-256 of the model's and optimizer's shape; empty: does not train, fits every model",
    "v": "[major, minor] of the wire version",
    "run": "of SHA-256 of the run id",
    "peer": "peer id: the hash of `key`",
    "key": "Ed25519 public key",
    "port": "on which the sender listens; 0: nowhere",
    "incarnation": "tells the processes of one identity apart; a later process has a larger one",
    "nonce": "fresh; what the other side signs",
    "token": "half of the link's secret, of which the keys and MACs of data streams are made",
}
HELLO_FACTS = {
    "role": "trainer, joiner (it waits for the state) or watcher (it looks on, and is never a member)",
    "client_only": "nobody can dial it",
    "region": "where it is, in words of any cloud; may be empty",
    "data": "false: it wants no data streams (watchers)",
    "terms": "what all must agree on: target batch size, codec, and more; a difference is refused by name",
    "outline": "a packed line for each thing that `schema` is made of, to name what differs",
    "epoch": "as in `progress`",
    "lineage": "as in `progress`",
    "total": "as in `progress`",
    "leader": "whom it follows; empty: nobody",
}
ROUNDS = {
    "progress": "Each trainer or joiner → its leader, after steps, at boundaries, and every 0.5 s; → every "
    "peer, when its epoch, lineage or role changes.",
    "totals": "Leader → each trainer that reported progress, when what the others will have changes.",
    "follow": "Whoever does not lead → the sender of a `progress` that was meant for a leader, or is one.",
    "prepare": "Leader → every member of the group, before the target is reached; again for each attempt.",
    "query": "Successor → every member of the last ballot, when its leader is lost.",
    "promise": "Member → the sender of `prepare` or `query`.",
    "refuse": "Member → the sender of `prepare` or `query`.",
    "ready": "Member → leader, when its training thread waits at a `step()` boundary and it has promised.",
    "begun": "Member → the other members, when `begin` came; to the leader only if it keeps rounds waiting.",
    "unready": "Member → leader, when the wait that made it ready ends before `begin`.",
    "begin": "Leader → every member, when all voters have promised and are ready, or its patience is over.",
    "done": "Voter → leader, when it holds the whole encoded result.",
    "stalled": "Voter → leader, every now and then from `begin` to `done`.",
    "complain": "Member → leader, when it cannot use what another member sent, or cannot go on itself.",
    "committed": "Leader → every member, when all voters are `done` with equal digests; anybody who knows → "
    "whoever asks.",
    "aborted": "Leader → every member, when an attempt is over; anybody who knows → whoever asks.",
    "inquire": "Member that waits for the outcome of a ballot → those that may know it: its members, and "
    "peers that are ahead.",
    "unknown": "Whoever does not know → the sender of `inquire`.",
    "catchup": "Newcomer → every peer, when results come faster than its link takes them beside the state, "
    "and until it knows whether they do.",
    "links": "Peer → the leader, when another one leads, or when something new was measured of its links.",
    "departing": "Peer → every peer with a link, when it begins to leave.",
}
OTHERS = {
    "_ping": ("each side of a link → the other, each second", "`at`: the sender's clock", "`_pong`"),
    "_pong": ("at once", "`at`: as it came", ""),
    "_alive": (
        "a peer to which a second process of a linked identity connects → the first process",
        "none",
        "`_yes`, or it is taken for dead",
    ),
    "_yes": ("at once", "none", ""),
    "_streams": (
        "each side → the other, when it changes",
        "`n`: data streams that it wants the link to have",
        "",
    ),
    "_resend": (
        "receiver → sender of chunks, when they are late by the link's own measure",
        "`transfer`; `contributions` and `results`: [part, chunk] each",
        "the chunks, unless they are on their way",
    ),
    "state": (
        "newcomer or healing peer → up to four members, when it begins to download",
        "`have`: [epoch, lineage] if results on top of it are enough; `root`: of a manifest begun; "
        "`aligned`: it asks several",
        "a manifest (epoch, lineage, sizes, hashes, signature), `history`; or `results`; "
        "or `busy`, with the `bytes` of the state, those that were copied or hashed (`done`), and "
        "seconds before it begins (`rest`); or `error`",
    ),
    "state-chunks": (
        "the same → a donor",
        "`root` of a manifest or `lineage` of a result; `chunks`: numbers; `transfer`: of the blob frames",
        "`ok`, or `error`",
    ),
    "ok": ("donor → who asked", "none", ""),
    "state-have": ("the same → each donor, as it goes on", "`epoch`: whose state it has now", ""),
    "state-done": ("the same → each donor, at the end", "none", ""),
    "state-gone": ("donor → who downloads, when its state is another one now, or it leaves", "`why`", ""),
    "result": (
        "donor → who downloads, for each round that it has committed since the snapshot",
        "all of a committed round but its bytes: see `ResultHead`",
        "",
    ),
    "handover": (
        "a peer that leaves → each receiver in turn",
        "`epoch`, `lineage`, `samples`, `bytes` and `hash` of the encoded sum of its gradients; `note`: "
        "which samples they are",
        "`transfer`: send it as blob frames; or `taken` false, with `why`",
    ),
    "handover-end": (
        "the same → that receiver",
        "`transfer`",
        "`taken`: whether the receiver counts these samples now",
    ),
    "claims": (
        "each side of a link → the other, when it comes up and when they change",
        "`runs`: positions of the data that it draws without a lease, as distances and lengths",
        "",
    ),
    "knows": (
        "a peer that gets no link to a third → a member",
        "`peer`: the third's id; in the answer `linked`, and if so `rtt` (seconds, to it), `relays` and "
        "`hosts`: where the member sees who asks, and the third",
        "whether the member has a link to it over which something comes, and relays",
    ),
    "punch": (
        "a peer that wants to meet another → a member, `to` whom; the member → the other, `from` whom; and, "
        "once the two have a link, for each data stream → the other",
        "`at`: where it can be dialled, [host, port] outside and perhaps inside of its NAT; `by`: the member "
        "that told so; `rtt`: seconds from one to the other and back. A member passes on what it sees at "
        "that moment alone, and its own `rtt`",
        "`at` of the other side, or `no`: why not; half an `rtt` later both dial",
    ),
    "relay": (
        "a peer that cannot meet another → a member that relays, for each connection",
        "`to`: whom",
        "`token`: under which it is to open its end of the tunnel, or `no`: why not",
    ),
    "tunnel": (
        "the relay → the other peer",
        "`from`: who asked; `token`: under which it is to open its end",
        "`tunnel`",
    ),
    "watch": (
        "a watcher → each member, once for each link",
        "none",
        "from then on `status`, `event`, `report`",
    ),
    "status": ("member → its watchers, each second", "see below", ""),
    "event": ("member → its watchers, as it happens", "`kind`, `fields`", ""),
    "report": ("member → its watchers, after each epoch", "`report`: the compact report, see below", ""),
}
STREAM_HELLO = {
    "link": "SHA-256 of the link's secret: which link the stream belongs to",
    "stream": "number of the stream in its link",
    "nonce": "fresh; used once in the life of a link",
    "mac": "HMAC-SHA-256 under the link's secret, over the role, the number and the nonce",
}
STREAM_ANSWER = {
    "nonce": "fresh",
    "mac": "HMAC-SHA-256 under the link's secret, over both nonces",
}
FRAME: Rows = (
    ("kind", "see below"),
    ("codec", "wire id of the codec of the body (CONTRIBUTION, RESULT)"),
    (
        "flags",
        "1: the sender knows that it sends this chunk again; 2: the body is an LZ4 block of the chunk's "
        "bytes, or empty when all are zero (CONTRIBUTION, RESULT, BLOB)",
    ),
    ("length", "bytes of the body"),
    ("transfer", "id of the attempt, or of the blob"),
    ("part", "index into the job's parts (CONTRIBUTION, RESULT), else 0"),
    ("chunk", "index inside the part or the blob"),
    ("count", "float32 elements (CONTRIBUTION, RESULT), else 0"),
    ("sender", "rank of the sender (CONTRIBUTION, RESULT), else 0"),
    ("body_crc", "CRC-32 of the body"),
    ("header_crc", "CRC-32 of the bytes before"),
)
FRAME_KINDS = {
    "CONTRIBUTION": "Member with a weight → owner of the part, from `begin` on: the chunk as a local mean.",
    "RESULT": "Owner → every other member: the encoded mean of the chunk, the same bytes for all.",
    "BLOB": "Donor → joiner: a chunk of the state. Peer that leaves → receiver: a chunk of its gradients.",
    "PING": "Each side → the other, at the heartbeat's interval, from a native thread where there is one. "
    "Its stamp is 0, and it is not answered, where PINGs come from the other side, but for one a second.",
    "PONG": "At once, with the `stamp` of the ping, unless that is 0.",
}
HEARTBEAT: Rows = (
    ("stamp", "the pinger's clock, opaque to the other side"),
    ("loop_age_s", "how long ago the sender's event loop was seen turning"),
    ("trainer_age_s", "how long ago its training thread called `step()`; infinity: never"),
)
DATAGRAM: Rows = (
    ("magic", '`"pD"`'),
    ("version", "of the table's wire format; another version is answered by three bytes that name ours"),
    ("kind", "see below; an answer has the kind of its request"),
    (
        "flags",
        "1 answer, 2 client only, 4 prove yourself, 8 carries a proof, 0x30 which try, 0x40 only a token",
    ),
    ("transaction", "fresh for each request; the answer repeats it"),
    ("sender", "peer id"),
    ("token", "proves that the sender receives at its address; zeros: none yet"),
    ("length", "bytes of the msgpack list that follows; then a proof (key, signature), then padding"),
)
DATAGRAMS = {
    "PING": ("who are you, and from where do you see me", "empty", "the asker's address"),
    "FIND": ("nodes close to an id", "id", "contacts"),
    "INDEX": (
        "who has records under a key",
        "key, cursor, digest of what is known",
        "entries, next cursor, count, digest, contacts",
    ),
    "FETCH": ("records, whole", "key, peer id prefixes", "[record, step, link, ms left] of each"),
    "STORE": ("keep this record", "record, step, link, ms left", "outcome, a newer record"),
    "REFRESH": ("the record is still valid", "key, prefix, incarnation, sequence, step, link", "outcome"),
    "ENTRIES": ("the newest links of some peers", "key, peer id prefixes", "entries"),
    "REVOKED": ("former members of a closed run", "key, cursor, statements to tell", "statements, cursor"),
    "DIAL": ("open a TCP connection to me", "port", "reached, failed or trying"),
}
RECORD: Rows = (
    ("version", "of the record's format"),
    ("key", "what the record is about: a run, say"),
    ("public_key", "its publisher's; the peer id is the hash of it"),
    ("incarnation", "of the publisher's process"),
    ("sequence", "orders the records of one incarnation"),
    ("lifetime_ms", "from its arrival, on the holder's clock"),
    ("anchor", "the end of a chain of 255 hashes; each refresh reveals the link before"),
    ("length", "bytes of the value that follows, then a 64-byte Ed25519 signature over all before it"),
)
PEER_INFO = {
    "version": "of this list; later versions append fields",
    "addresses": "[host, port] each, for TCP and UDP, best first",
    "client_only": "nobody can dial it",
    "region": "at most 64 characters",
    "epoch": "the one that it accumulates for",
    "lineage": "at most 32 bytes",
    "samples_per_second": "float",
    "role": "true: a watcher",
    "model": "hash of the model's schema, at most 32 bytes",
    "departing": "it has said that it leaves",
    "report": "the compact report of its last epoch, if there is room",
    "name": "for people, at most 32 characters; several peers may have the same",
    "joining": "it has not got the run's state yet",
    "udp": "false: UDP does not reach it, so it takes part in the table over TCP",
}


def limits() -> Iterator[tuple[str, int]]:
    """Sizes beyond which a peer refuses."""
    yield "a message before the sender has proved itself", handshake.MAX_HELLO_BYTES
    yield "a control message", control.MAX_MESSAGE_BYTES
    yield "control messages queued on one link, before it is closed", control.MAX_QUEUED_BYTES
    yield "a note in `ready` or `begin`", fields.MAX_NOTE
    yield "the body of a frame", frames.MAX_BODY_BYTES
    yield "a datagram", wire.MAX_DATAGRAM
    yield "the value of a record", record.MAX_VALUE_BYTES
    yield "a compact report", compact.MAX_BYTES
