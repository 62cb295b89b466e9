// AES-256-GCM over the frames of one direction of a stream, by the system's libcrypto, opened at run time.
//
// The nonce is the number of the frame in its stream. The header stays readable, and has a short tag instead of the
// checksums, so that a forged header is refused. The header is the associated data of the body, whose tag follows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "frame.h"

struct evp_cipher_ctx_st;

namespace p2pavg::pump {

constexpr size_t kTagBytes = 16;
constexpr uint64_t kMostFrames = uint64_t{1} << 32;  // under one key

class Cipher {
  public:
    enum class Direction { encrypt, decrypt };

    static bool available();  // whether this machine has libcrypto

    // Throws std::invalid_argument without libcrypto, or when the key has not 32 bytes.
    Cipher(const std::string &key, Direction direction);
    ~Cipher();
    Cipher(const Cipher &) = delete;
    Cipher &operator=(const Cipher &) = delete;

    // Replaces the checksums of a written header by its tag.
    void sign(uint64_t frame, uint8_t header[kHeaderBytes]);
    bool verify(uint64_t frame, const uint8_t header[kHeaderBytes]);
    // out: length + kTagBytes; may begin where `body` does.
    void encrypt(uint64_t frame, const uint8_t header[kHeaderBytes], const uint8_t *body, size_t length, uint8_t *out);
    // Decrypts in place. Returns false when the body, its tag or its header was changed.
    bool decrypt(uint64_t frame, const uint8_t header[kHeaderBytes], uint8_t *body, size_t length,
                 const uint8_t tag[kTagBytes]);

  private:
    void start(uint32_t purpose, uint64_t frame, const uint8_t *associated, size_t length);

    const Direction direction_;
    evp_cipher_ctx_st *context_;
};

}  // namespace p2pavg::pump
