#include "cipher.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

struct evp_cipher_st;
struct engine_st;

namespace p2pavg::pump {

namespace {

constexpr size_t kKeyBytes = 32, kNonceBytes = 12, kSignedBytes = 32, kShortTagBytes = 8;
constexpr uint32_t kBody = 0, kHeader = 1;
constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG

// The functions of libcrypto that the cipher needs; versions 1.1 and 3 both have them.
struct Library {
    evp_cipher_ctx_st *(*create)() = nullptr;
    void (*destroy)(evp_cipher_ctx_st *) = nullptr;
    const evp_cipher_st *(*aes_256_gcm)() = nullptr;
    int (*init)(evp_cipher_ctx_st *, const evp_cipher_st *, engine_st *, const unsigned char *, const unsigned char *,
                int) = nullptr;
    int (*update)(evp_cipher_ctx_st *, unsigned char *, int *, const unsigned char *, int) = nullptr;
    int (*finish)(evp_cipher_ctx_st *, unsigned char *, int *) = nullptr;
    int (*control)(evp_cipher_ctx_st *, int, int, void *) = nullptr;
    bool complete = false;

    Library() {
        for (const char *name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
            void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
            if (!library) continue;
            complete = find(library, "EVP_CIPHER_CTX_new", create) && find(library, "EVP_CIPHER_CTX_free", destroy) &&
                       find(library, "EVP_aes_256_gcm", aes_256_gcm) && find(library, "EVP_CipherInit_ex", init) &&
                       find(library, "EVP_CipherUpdate", update) && find(library, "EVP_CipherFinal_ex", finish) &&
                       find(library, "EVP_CIPHER_CTX_ctrl", control);
            if (complete) return;
            dlclose(library);
        }
    }

  private:
    template <typename Function>
    static bool find(void *library, const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }
};

const Library &crypto() {
    static const Library library;
    return library;
}

void need(int result) {
    if (result != 1) throw std::runtime_error("libcrypto refuses AES-256-GCM");
}

}  // namespace

bool Cipher::available() { return crypto().complete; }

Cipher::Cipher(const std::string &key, Direction direction) : direction_(direction), context_(nullptr) {
    if (!available()) throw std::invalid_argument("encrypted streams need libcrypto");
    if (key.size() != kKeyBytes) throw std::invalid_argument("a stream's key has 32 bytes");
    context_ = crypto().create();
    if (!context_) throw std::bad_alloc();
    const auto *bytes = reinterpret_cast<const unsigned char *>(key.data());
    if (crypto().init(context_, crypto().aes_256_gcm(), nullptr, bytes, nullptr, direction == Direction::encrypt) != 1) {
        crypto().destroy(context_);
        need(0);
    }
}

Cipher::~Cipher() { crypto().destroy(context_); }

void Cipher::start(uint32_t purpose, uint64_t frame, const uint8_t *associated, size_t length) {
    uint8_t nonce[kNonceBytes];
    std::memcpy(nonce, &purpose, sizeof purpose);
    std::memcpy(nonce + sizeof purpose, &frame, sizeof frame);
    need(crypto().init(context_, nullptr, nullptr, nullptr, nonce, direction_ == Direction::encrypt));
    int done = 0;
    need(crypto().update(context_, nullptr, &done, associated, static_cast<int>(length)));
}

void Cipher::sign(uint64_t frame, uint8_t header[kHeaderBytes]) {
    start(kHeader, frame, header, kSignedBytes);
    uint8_t tag[kTagBytes];
    int done = 0;
    need(crypto().finish(context_, tag, &done));
    need(crypto().control(context_, kGetTag, kTagBytes, tag));
    std::memcpy(header + kSignedBytes, tag, kShortTagBytes);
}

bool Cipher::verify(uint64_t frame, const uint8_t header[kHeaderBytes]) {
    start(kHeader, frame, header, kSignedBytes);
    uint8_t tag[kShortTagBytes], rest[kTagBytes];
    std::memcpy(tag, header + kSignedBytes, kShortTagBytes);
    need(crypto().control(context_, kSetTag, kShortTagBytes, tag));
    int done = 0;
    return crypto().finish(context_, rest, &done) == 1;
}

void Cipher::encrypt(uint64_t frame, const uint8_t header[kHeaderBytes], const uint8_t *body, size_t length,
                     uint8_t *out) {
    start(kBody, frame, header, kHeaderBytes);
    int done = 0;
    if (length) need(crypto().update(context_, out, &done, body, static_cast<int>(length)));
    need(crypto().finish(context_, out + length, &done));
    need(crypto().control(context_, kGetTag, kTagBytes, out + length));
}

bool Cipher::decrypt(uint64_t frame, const uint8_t header[kHeaderBytes], uint8_t *body, size_t length,
                     const uint8_t tag[kTagBytes]) {
    start(kBody, frame, header, kHeaderBytes);
    int done = 0;
    if (length) need(crypto().update(context_, body, &done, body, static_cast<int>(length)));
    uint8_t copy[kTagBytes], rest[kTagBytes];
    std::memcpy(copy, tag, kTagBytes);
    need(crypto().control(context_, kSetTag, kTagBytes, copy));
    return crypto().finish(context_, rest, &done) == 1;
}

}  // namespace p2pavg::pump
