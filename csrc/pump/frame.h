// Frames of a data stream: a 40-byte little-endian header and a body. The same bytes as p2pavg/transport/frames.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace p2pavg::pump {

enum class Kind : uint8_t { contribution = 1, result = 2, blob = 3, ping = 4, pong = 5 };

constexpr size_t kHeaderBytes = 40;
constexpr uint32_t kMaxBodyBytes = 4u << 20;
constexpr uint16_t kFlagRepeat = 1;
constexpr uint16_t kFlagPacked = 2;  // the body is an LZ4 block; an empty body: all bytes of the chunk are zero
constexpr uint32_t kHeartbeatBytes = 16;
constexpr uint64_t kNoAnswer = 0;  // the stamp of a PING that asks for no PONG

struct Header {
    Kind kind = Kind::ping;
    uint8_t codec = 0;
    uint16_t flags = 0;
    uint32_t length = 0;
    uint64_t transfer = 0;
    uint32_t part = 0;
    uint32_t chunk = 0;
    uint32_t count = 0;
    uint32_t sender = 0;
    uint32_t body_crc = 0;
};

// Body of a PING or PONG. Ages in seconds, never negative; infinity: never seen.
struct Heartbeat {
    uint64_t stamp = 0;
    float loop_age = 0;
    float trainer_age = 0;
};

void write_header(const Header &header, uint8_t out[kHeaderBytes]);

// nullptr for a header that a correct peer sends; else the fault. checked: a tag has proved the header.
const char *read_header(const uint8_t in[kHeaderBytes], Header &out, bool checked = false);

void write_heartbeat(const Heartbeat &beat, uint8_t out[kHeartbeatBytes]);
const char *read_heartbeat(const uint8_t in[kHeartbeatBytes], Heartbeat &out);

}  // namespace p2pavg::pump
