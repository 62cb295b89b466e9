// The module p2pavg._cuda. Device pointers and streams come as integers: torch's data_ptr() and cuda_stream; the
// callers in p2pavg/codecs/cuda.py check types, sizes and contiguity and keep tensors alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "kernels.h"
#include "launch.h"
#include "staging.h"

namespace nb = nanobind;
using namespace p2pavg;
using nb::literals::operator""_a;

namespace {

template <typename T>
T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

cudaStream_t stream_of(uintptr_t handle) { return pointer<CUstream_st>(handle); }

void check_arguments(int codec, size_t chunk) {
    if (codec < P2PAVG_NONE || codec > P2PAVG_INT4) throw nb::value_error("unknown codec; known are 0 to 4");
    if (chunk == 0) throw nb::value_error("a chunk needs at least one element");
}

Draws draws_of(nb::object key) {
    if (key.is_none()) return {false, 0, 0, 0};
    const auto tuple = nb::cast<nb::tuple>(key);
    return {true, nb::cast<uint64_t>(tuple[0]), nb::cast<uint64_t>(tuple[1]), nb::cast<uint64_t>(tuple[2])};
}

Feedback feedback_of(nb::object owing) {
    if (owing.is_none()) return {nullptr, nullptr, 0.0f};
    const auto tuple = nb::cast<nb::tuple>(owing);
    return {pointer<const uint16_t>(nb::cast<uintptr_t>(tuple[0])), pointer<uint16_t>(nb::cast<uintptr_t>(tuple[1])),
            static_cast<float>(nb::cast<double>(tuple[2]))};
}

// "" when the kernels run on a device here, else why they do not.
std::string problem() {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
    if (error == cudaSuccess) error = usable();
    cudaGetLastError();  // clears the error, which the next caller would see otherwise
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

void encode_device(int codec, uintptr_t src, size_t n, size_t chunk, double scale, uintptr_t dst, uintptr_t flag,
                   uintptr_t stream, nb::object draws) {
    check_arguments(codec, chunk);
    check(encode(codec, pointer<const float>(src), n, chunk, static_cast<float>(scale), draws_of(draws), Feedback{},
                 pointer<uint8_t>(dst), pointer<int>(flag), stream_of(stream)),
          "encoding");
}

void decode_device(int codec, uintptr_t src, size_t n, size_t chunk, double scale, bool add, uintptr_t dst,
                   uintptr_t flag, uintptr_t stream) {
    check_arguments(codec, chunk);
    check(decode(codec, pointer<const uint8_t>(src), n, chunk, static_cast<float>(scale), add, pointer<float>(dst),
                 pointer<int>(flag), stream_of(stream)),
          "decoding");
}

void accumulate_device(const std::vector<uintptr_t> &src, const std::vector<uintptr_t> &dst,
                       const std::vector<size_t> &counts, int type, double scale, uintptr_t flag, uintptr_t stream) {
    if (src.size() != dst.size() || src.size() != counts.size())
        throw nb::value_error("src, dst and counts must have one entry per tensor");
    std::vector<Term> terms;
    for (size_t i = 0; i < src.size(); i++) terms.push_back({pointer<const void>(src[i]), pointer<float>(dst[i]), counts[i]});
    check(accumulate(terms.data(), terms.size(), static_cast<FloatType>(type), static_cast<float>(scale),
                     pointer<int>(flag), stream_of(stream)),
          "accumulating");
}

void rescale_device(uintptr_t data, size_t n, uintptr_t wanted, uintptr_t current, uintptr_t stream) {
    check(rescale(pointer<float>(data), n, pointer<const float>(wanted), pointer<float>(current), stream_of(stream)),
          "rescaling");
}

void clear_device(uintptr_t data, size_t n, uintptr_t flag, uintptr_t told, uintptr_t stream) {
    check(clear_if(pointer<float>(data), n, pointer<const float>(flag), pointer<float>(told), stream_of(stream)),
          "clearing");
}

// Page-locked host memory, freed with the array.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> pinned(size_t bytes) {
    void *memory = nullptr;
    check(cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocPortable), "allocating page-locked memory");
    nb::capsule owner(memory, [](void *p) noexcept { cudaFreeHost(p); });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory, {bytes}, owner);
}

// Whether the device reaches this address of the host's memory.
bool is_pinned(uintptr_t address) {
    cudaPointerAttributes attributes;
    const cudaError_t error = cudaPointerGetAttributes(&attributes, pointer<const void>(address));
    cudaGetLastError();
    return error == cudaSuccess && attributes.type == cudaMemoryTypeHost;
}

std::unique_ptr<Transfer> download(Staging &staging, int codec, uintptr_t src, size_t n, size_t chunk, double scale,
                                   uintptr_t host, uintptr_t stream, nb::object draws, nb::object owing) {
    check_arguments(codec, chunk);
    const Draws key = draws_of(draws);
    const Feedback feedback = feedback_of(owing);
    nb::gil_scoped_release release;
    return staging.download(codec, pointer<const float>(src), n, chunk, static_cast<float>(scale), key, feedback,
                            pointer<uint8_t>(host), stream_of(stream));
}

std::unique_ptr<Transfer> upload(Staging &staging, int codec, uintptr_t host, size_t n, size_t chunk, double scale,
                                 uintptr_t dst, uintptr_t stream) {
    check_arguments(codec, chunk);
    nb::gil_scoped_release release;
    return staging.upload(codec, pointer<const uint8_t>(host), n, chunk, static_cast<float>(scale), pointer<float>(dst),
                          stream_of(stream));
}

}  // namespace

NB_MODULE(_cuda, m) {
    m.attr("SOURCES") = P2PAVG_SOURCES;
    m.doc() = "CUDA kernels of p2pavg; import p2pavg.codecs.cuda instead.";
    m.def("problem", &problem);
    m.def("encoded_size", &encoded_size, "codec"_a, "n"_a);
    m.def("encode", &encode_device, "codec"_a, "src"_a, "n"_a, "chunk"_a, "scale"_a, "dst"_a, "flag"_a, "stream"_a,
          "draws"_a.none() = nb::none());
    m.def("decode", &decode_device, "codec"_a, "src"_a, "n"_a, "chunk"_a, "scale"_a, "add"_a, "dst"_a, "flag"_a,
          "stream"_a);
    m.def("accumulate", &accumulate_device, "src"_a, "dst"_a, "counts"_a, "type"_a, "scale"_a, "flag"_a, "stream"_a);
    m.def("rescale", &rescale_device, "data"_a, "n"_a, "wanted"_a, "current"_a, "stream"_a);
    m.def("clear_if", &clear_device, "data"_a, "n"_a, "flag"_a, "told"_a, "stream"_a);
    m.def("pinned", &pinned, "nbytes"_a);
    m.def("is_pinned", &is_pinned, "address"_a);

    nb::class_<Transfer>(m, "Transfer")
        .def("done", &Transfer::done)
        .def("wait", &Transfer::wait, nb::call_guard<nb::gil_scoped_release>())
        .def("hold", [](Transfer &transfer, uintptr_t stream) { transfer.hold(stream_of(stream)); }, "stream"_a);

    nb::class_<Staging>(m, "Staging")
        .def(nb::init<int, size_t, int>(), "device"_a, "slot_bytes"_a, "slots"_a)
        .def("download", &download, "codec"_a, "src"_a, "n"_a, "chunk"_a, "scale"_a, "host"_a, "stream"_a,
             "draws"_a.none() = nb::none(), "owing"_a.none() = nb::none())
        .def("upload", &upload, "codec"_a, "host"_a, "n"_a, "chunk"_a, "scale"_a, "dst"_a, "stream"_a)
        .def("device_bytes", &Staging::device_bytes);
}
