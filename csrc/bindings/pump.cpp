// The pump for Python, with integers for addresses and tuples for events. The caller keeps the memory alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "pump.h"

namespace nb = nanobind;
using namespace p2pavg::pump;

namespace {

using PartTuple = std::tuple<uint32_t, uint64_t, uint64_t, std::vector<uint32_t>, bool>;  // as plan.part.Part

std::shared_ptr<Job> open_job(const Pump &pump, uint64_t transfer) {
    auto job = pump.job(transfer);
    if (!job) throw std::invalid_argument("no such transfer is open");
    return job;
}

void open_reduce(Pump &pump, uint64_t transfer, uint32_t rank, const std::vector<int64_t> &links,
                 const std::vector<bool> &voters, const std::vector<PartTuple> &parts, std::vector<int64_t> groups,
                 bool gathers, uint32_t chunk_elements, int contribution_codec, int result_codec, uintptr_t result,
                 size_t result_bytes) {
    ReduceJob spec;
    spec.transfer = transfer;
    spec.rank = rank;
    spec.voters.assign(voters.begin(), voters.end());
    for (const auto &[owner, start, count, deputies, swaps] : parts)
        spec.parts.push_back({owner, start, count, deputies, swaps});
    spec.groups = std::move(groups);
    spec.gathers = gathers;
    spec.chunk_elements = chunk_elements;
    spec.contribution_codec = contribution_codec;
    spec.result_codec = result_codec;
    spec.result = reinterpret_cast<uint8_t *>(result);
    spec.result_bytes = result_bytes;
    pump.open_reduce(std::move(spec), links);
}

void begin(Pump &pump, uint64_t transfer, std::vector<double> weights, double scale, uintptr_t source,
           size_t source_elements, uintptr_t encoded, size_t encoded_bytes, uint32_t ready) {
    Start start;
    start.weights = std::move(weights);
    start.scale = scale;
    start.source = reinterpret_cast<const float *>(source);
    start.source_elements = source_elements;
    start.encoded = reinterpret_cast<const uint8_t *>(encoded);
    start.encoded_bytes = encoded_bytes;
    start.ready = ready;
    pump.begin(transfer, std::move(start));
}

nb::list drain(Pump &pump) {
    nb::list out;
    for (const Event &event : pump.drain())
        out.append(nb::make_tuple(static_cast<int>(event.type), event.link, event.stream, event.transfer, event.index,
                                  event.text));
    return out;
}

nb::tuple progress(const Pump &pump, uint64_t transfer) {
    const JobProgress p = open_job(pump, transfer)->progress();
    auto counts = [](const std::vector<uint32_t> &values) { return nb::tuple(nb::cast(values)); };
    return nb::make_tuple(counts(p.contributions_received), counts(p.results_received), counts(p.contributions_sent),
                          counts(p.results_sent), p.first_byte_at, p.last_byte_at);
}

nb::list stats(const Pump &pump, int64_t link) {
    nb::list out;
    for (const StreamStats &s : pump.stats(link))
        out.append(nb::make_tuple(s.stream, s.bytes_sent, s.bytes_received, s.rtt, s.window, s.delivery_rate, s.unacked,
                                  s.last_received_at, s.retransmits, s.unsent, s.unread));
    return out;
}

}  // namespace

void bind_pump(nb::module_ &m) {
    using unlocked = nb::call_guard<nb::gil_scoped_release>;
    m.attr("PUMP_EVENTS") = nb::make_tuple("stream_closed", "job_done", "job_refused", "blob_chunk", "blob_sent", "released");
    m.def("can_encrypt", &Cipher::available);
    nb::class_<Pump>(m, "Pump")
        .def(nb::init<size_t>(), nb::arg("threads"))
        .def("event_fd", &Pump::event_fd)
        .def("drain", &drain)
        .def("attach",
             [](Pump &pump, int64_t link, int64_t stream, int fd, const nb::bytes &sending, const nb::bytes &receiving) {
                 StreamKeys keys{{sending.c_str(), sending.size()}, {receiving.c_str(), receiving.size()}};
                 nb::gil_scoped_release released;
                 return pump.attach(link, stream, fd, std::move(keys));
             })
        .def("detach", &Pump::detach, unlocked())
        .def("detach_all", &Pump::detach_all, unlocked())
        .def("repeat", &Pump::repeat)
        .def("pace", &Pump::pace)
        .def("streams", &Pump::streams)
        .def("open_reduce", &open_reduce, nb::arg("transfer"), nb::arg("rank"), nb::arg("links"), nb::arg("voters"),
             nb::arg("parts"), nb::arg("groups"), nb::arg("gathers"), nb::arg("chunk_elements"), nb::arg("contribution_codec"),
             nb::arg("result_codec"), nb::arg("result"), nb::arg("result_bytes"))
        .def("begin", &begin, nb::arg("transfer"), nb::arg("weights"), nb::arg("scale"), nb::arg("source"),
             nb::arg("source_elements"), nb::arg("encoded"), nb::arg("encoded_bytes"),
             nb::arg("ready"))
        .def("supply", &Pump::supply, nb::arg("transfer"), nb::arg("ready"), unlocked())
        .def("cancel", &Pump::cancel, unlocked())
        .def("finish", &Pump::finish, unlocked())
        .def("progress", &progress)
        .def("missing",
             [](const Pump &pump, uint64_t transfer, uint32_t rank) {
                 ChunkNames contributions, results;
                 open_job(pump, transfer)->missing(rank, contributions, results);
                 return std::make_pair(contributions, results);
             })
        .def("resend",
             [](const Pump &pump, uint64_t transfer, uint32_t rank, const ChunkNames &contributions,
                const ChunkNames &results) { open_job(pump, transfer)->resend(rank, contributions, results); })
        .def("part_crcs",
             [](const Pump &pump, uint64_t transfer) {
                 nb::list out;
                 for (const std::string &crcs : open_job(pump, transfer)->part_crcs())
                     out.append(nb::bytes(crcs.data(), crcs.size()));
                 return out;
             })
        .def("open_blob",
             [](Pump &pump, uint64_t transfer, uintptr_t buffer, size_t bytes, size_t chunk_bytes) {
                 pump.open_blob(transfer, reinterpret_cast<uint8_t *>(buffer), bytes, chunk_bytes);
             })
        .def("send_blob",
             [](Pump &pump, int64_t link, uint64_t transfer, uint32_t chunk, uintptr_t data, size_t length) {
                 pump.send_blob(link, transfer, chunk, reinterpret_cast<const uint8_t *>(data), length);
             })
        .def("stats", &stats)
        .def("traffic", &Pump::traffic)
        .def("wire",
             [](const Pump &pump, int64_t link) {
                 const Wire wire = pump.wire(link);
                 return std::make_pair(wire.sent, wire.received);
             })
        .def("health",
             [](const Pump &pump, int64_t link) {
                 const LinkHealth h = pump.health(link);
                 return nb::make_tuple(h.last_heard_at, h.rtt, h.loop_age, h.trainer_age);
             })
        .def("set_heartbeat", &Pump::set_heartbeat)
        .def("note_loop", &Pump::note_loop)
        .def("note_trainer", &Pump::note_trainer)
        .def("set_upload_limit", &Pump::set_upload_limit)
        .def("cpu_seconds", &Pump::cpu_seconds)
        .def("spared", &Pump::spared)
        .def("close", &Pump::close, unlocked())
        .def("abandon", &Pump::abandon);
}
