// One attempt to average one vector: the contributors of each chunk, the sums of own parts, the encoded result.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "events.h"
#include "frame.h"
#include "kernels.h"
#include "landing.h"
#include "link.h"

namespace p2pavg::pump {

struct Part {
    uint32_t owner;
    uint64_t start;
    uint64_t count;
    std::vector<uint32_t> deputies = {};
    bool swaps = false;  // the owner and its only deputy give each other their means, and both make the result
};

constexpr uint32_t kNobody = UINT32_MAX;  // no rank

struct ReduceJob {
    uint64_t transfer = 0;
    uint32_t rank = 0;
    std::vector<uint8_t> voters;
    std::vector<Part> parts;
    std::vector<int64_t> groups;  // indexed by rank; needed where parts have deputies
    bool gathers = false;  // each part is its owner's contribution, in a sparse codec, and nothing is summed
    uint32_t chunk_elements = 0;
    int contribution_codec = 0;
    int result_codec = 0;
    uint8_t *result = nullptr;
    size_t result_bytes = 0;
};

// The arguments that are known when the round begins.
struct Start {
    std::vector<double> weights;  // indexed by rank
    double scale = 1;             // multiplies source
    const float *source = nullptr;  // this member's contribution: at most one of source and encoded is set
    size_t source_elements = 0;
    const uint8_t *encoded = nullptr;
    size_t encoded_bytes = 0;
    uint32_t ready = UINT32_MAX;  // the first so many chunks of encoded are in place; the others are supplied later
};

struct Chunk {
    uint64_t first;  // element of the vector at which the chunk begins
    uint32_t count;
    uint32_t part;
    uint32_t index;  // number of the chunk in its part
    uint64_t result_at, encoded_at;
    uint32_t result_length, encoded_length;
};

// This member's place in the tree of one part; p2pavg/plan describes the trees.
struct Place {
    uint32_t parent;  // this member's own rank where it makes the result
    bool reduces;     // this member owns the part, or is a deputy for it
    std::vector<uint32_t> children;
    uint32_t partner = kNobody;   // the member with which this one swaps means
    std::vector<double> weights;  // once begun, by rank: the weights of the terms summed here; empty unless `reduces`
    double upward = 0;            // once begun: the weight of what is sent; at an owner that does not swap, of all
    uint32_t contributors = 0;    // once begun: how many of `weights` are positive, the partner's apart
};

struct JobProgress {
    std::vector<uint32_t> contributions_received, results_received, contributions_sent, results_sent;
    double first_byte_at = 0, last_byte_at = 0;
};

using ChunkNames = std::vector<std::pair<uint32_t, uint32_t>>;  // (part, chunk)

class Job : public Receiver, public std::enable_shared_from_this<Job> {
  public:
    // links: indexed by rank, nullptr at this member's own. Throws std::invalid_argument when the numbers do not match.
    Job(ReduceJob spec, std::vector<std::shared_ptr<Link>> links, EventQueue &events, BufferPool &accumulators);
    ~Job() override;

    // Callable on the loop thread only.
    void begin(Start start);
    void supply(uint32_t ready);  // the first `ready` chunks of the encoded contribution are in place
    JobProgress progress() const;
    void missing(uint32_t rank, ChunkNames &contributions, ChunkNames &results) const;
    void resend(uint32_t rank, const ChunkNames &contributions, const ChunkNames &results);
    std::vector<std::string> part_crcs() const;  // little-endian CRC-32s of the encoded chunks of each part
    bool begun() const { return begun_.load(std::memory_order_acquire); }
    const std::vector<std::shared_ptr<Link>> &links() const { return links_; }
    void finish();  // results for joiners are still sent
    bool finished() const { return finished_.load(std::memory_order_acquire); }

    // Callable on worker threads.
    enum class Verdict { hold, discard, accept };
    Verdict admit(const Header &header, const Link &from, uint32_t &chunk);
    void contribute(uint32_t rank, uint32_t chunk, const uint8_t *body);
    void landed(uint32_t chunk, uint32_t crc) override;
    void sent(const Item &item);
    void refuse(uint32_t rank, const char *why);
    // Reduces one chunk that no other member contributes to; returns false when no such chunk is left.
    bool reduce_local_chunk();
    bool has_local_chunks() const;
    void touch(double now);  // notes the time of a sent or received gradient byte
    bool voters_served() const { return voter_sends_left_.load(std::memory_order_acquire) == 0; }
    bool joiners_served() const { return joiner_sends_left_.load(std::memory_order_acquire) == 0; }
    bool is_voter(uint32_t rank) const { return spec.voters[rank] != 0; }

    const Chunk &chunk(uint32_t index) const { return chunks_[index]; }
    // Whether a chunk that came as a result can be one. Of a mean its owner answers for that.
    bool is_sound(uint32_t chunk, const uint8_t *body) const;
    uint8_t *result_of(uint32_t chunk) const { return spec.result + chunks_[chunk].result_at; }
    uint32_t result_crc(uint32_t chunk) const { return crcs_[chunk]; }
    const Start &begun_with() const { return start_; }
    // The encoded partial mean of a chunk that is sent as one.
    const uint8_t *partial_of(uint32_t chunk) const { return partials_[chunk].data(); }
    bool sends_partial(uint32_t chunk) const { return place(chunk).reduces && receiver(chunk) != spec.rank; }

    const ReduceJob spec;

  private:
    struct Sum {
        Buffer accumulator;
        uint32_t contributions = 0;
        bool whole = false;  // the mean of a swapped chunk is encoded
        Buffer other;        // and the partner's, once it is here
    };
    static constexpr size_t kStripes = 64;

    const Place &place(uint32_t chunk) const { return places_[chunks_[chunk].part]; }
    uint32_t parent(uint32_t chunk) const { return place(chunk).parent; }
    // To whom this member sends what it contributes or adds up; its own rank: to nobody.
    uint32_t receiver(uint32_t chunk) const { return place(chunk).partner == kNobody ? parent(chunk) : place(chunk).partner; }
    bool swaps_with(uint32_t chunk, uint32_t rank) const { return place(chunk).partner == rank; }
    bool is_child(uint32_t chunk, uint32_t rank) const { return child_[chunks_[chunk].part * links_.size() + rank] != 0; }
    bool is_partial(uint32_t chunk, uint32_t rank) const;  // whether `rank` contributes a mean in the result codec
    uint32_t parent_of(const Part &part, uint32_t rank) const;
    bool sums_up(const Part &part, uint32_t rank) const;
    double subtree(const Part &part, uint32_t rank) const;
    void settle_weights();
    void fill_absent();
    uint32_t chunks_before(uint32_t ready) const;
    bool find(uint32_t part, uint32_t index, uint32_t &chunk) const;
    static bool fits(const Header &header, uint32_t length);
    bool contributes(uint32_t rank) const { return start_.weights[rank] > 0; }
    bool supplied(uint32_t chunk) const { return chunk < supplied_.load(std::memory_order_acquire); }
    Item frame(Kind kind, uint32_t rank, uint32_t chunk, bool repeat = false);
    void send_contributions(uint32_t first, uint32_t end);
    void send_one(Kind kind, uint32_t rank, uint32_t chunk);
    P2pavgTerm own_term(const Chunk &chunk) const;
    bool gather_own(const Chunk &chunk);
    bool mean_of_own(uint32_t index);
    void keep_other(uint32_t rank, uint32_t index, const uint8_t *body);
    void unite(uint32_t index);
    bool both_here(uint32_t index) const;
    uint32_t whose_fault(uint32_t rank, uint32_t chunk, const uint8_t *body);
    int codec_of(uint32_t rank, uint32_t chunk) const {
        return is_partial(chunk, rank) ? spec.result_codec : spec.contribution_codec;
    }
    // The address of the encoded mean of a chunk that this member reduces.
    uint8_t *mean_of(uint32_t chunk);
    void reduced(uint32_t chunk);
    void in_place(uint32_t chunk);
    void maybe_done();
    std::atomic<uint8_t> &sent_flag(uint32_t rank, uint32_t chunk) { return sent_[rank * chunks_.size() + chunk]; }

    const std::vector<std::shared_ptr<Link>> links_;
    EventQueue &events_;
    BufferPool &accumulators_;
    std::vector<Chunk> chunks_;
    std::vector<uint32_t> first_chunk_;  // of each part, and then the number of chunks
    std::vector<Place> places_;    // of each part
    std::vector<uint8_t> child_;   // at part * ranks + rank: whether the rank is this member's child in the part
    std::vector<uint32_t> local_chunks_;  // once begun: chunks reduced here to which no other member contributes

    Start start_;
    // What this member contributes: in an all-gather its own part, else the whole vector.
    uint64_t elements_ = 0, encoded_bytes_ = 0, own_element_ = 0, own_byte_ = 0;
    uint32_t own_chunk_ = 0;

    std::vector<Sum> sums_;
    std::vector<Buffer> partials_;  // encoded means of chunks that are sent as partial ones
    std::mutex stripes_[kStripes];
    std::vector<uint32_t> crcs_;
    std::unique_ptr<std::atomic<uint8_t>[]> contributed_, sent_, refused_;
    std::unique_ptr<std::atomic<uint32_t>[]> contributions_received_, results_received_, contributions_sent_,
        results_sent_;
    std::atomic<uint32_t> results_left_{0}, voter_sends_left_{0}, joiner_sends_left_{0}, next_local_{0},
        supplied_{0};
    std::atomic<bool> begun_{false}, done_{false}, finished_{false};
    std::atomic<double> first_byte_at_{0}, last_byte_at_{0};
};

}  // namespace p2pavg::pump
