#include "encryption/encrypted_stream.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "encryption/libcrypto.h"

namespace encryption {
namespace {

constexpr size_t header_nbytes = 4;
constexpr size_t whole_nbytes = header_nbytes + max_record_nbytes + tag_nbytes;
constexpr size_t nonce_nbytes = 12;
constexpr uint32_t for_record = 0, for_next_key = 1;

unsigned char* bytes(char* data) { return reinterpret_cast<unsigned char*>(data); }
const unsigned char* bytes(const char* data) {
    return reinterpret_cast<const unsigned char*>(data);
}

}  // namespace

RecordCipher::RecordCipher(const unsigned char* key, bool encrypts, uint64_t num_per_key)
    : context_(LibCrypto::find()->EVP_CIPHER_CTX_new()),
      encrypts_(encrypts),
      num_per_key_(num_per_key) {
    const LibCrypto* crypto = LibCrypto::find();
    has_key_ =
        context_ != nullptr && crypto->EVP_CipherInit_ex(context_, crypto->EVP_aes_256_gcm(),
                                                         nullptr, key, nullptr, encrypts) == 1;
}

RecordCipher::~RecordCipher() { LibCrypto::find()->EVP_CIPHER_CTX_free(context_); }

bool RecordCipher::begin(const char* header, size_t nbytes) {
    if (!has_key_) return false;
    if (number_ > 0 && number_ % num_per_key_ == 0 && !change_key()) return false;
    int done;
    return set_nonce(for_record, number_++, encrypts_) &&
           LibCrypto::find()->EVP_CipherUpdate(context_, nullptr, &done, bytes(header),
                                               static_cast<int>(nbytes)) == 1;
}

bool RecordCipher::update(const char* in, size_t nbytes, char* out) {
    int done;
    return LibCrypto::find()->EVP_CipherUpdate(context_, bytes(out), &done, bytes(in),
                                               static_cast<int>(nbytes)) == 1;
}

bool RecordCipher::end(char* tag) {
    const LibCrypto* crypto = LibCrypto::find();
    unsigned char nothing[tag_nbytes];
    int done, size = static_cast<int>(tag_nbytes);
    if (!encrypts_ && crypto->EVP_CIPHER_CTX_ctrl(context_, set_tag, size, tag) != 1) return false;
    if (crypto->EVP_CipherFinal_ex(context_, nothing, &done) != 1) return false;
    return !encrypts_ || crypto->EVP_CIPHER_CTX_ctrl(context_, get_tag, size, tag) == 1;
}

bool RecordCipher::set_nonce(uint32_t purpose, uint64_t number, int encrypts) {
    unsigned char nonce[nonce_nbytes];
    std::memcpy(nonce, &purpose, sizeof purpose);
    std::memcpy(nonce + sizeof purpose, &number, sizeof number);
    return LibCrypto::find()->EVP_CipherInit_ex(context_, nullptr, nullptr, nullptr, nonce,
                                                encrypts) == 1;
}

// The next key is what this one makes of zeros, with a nonce that no record has.
bool RecordCipher::change_key() {
    const char zeros[key_nbytes] = {};
    char key[key_nbytes];
    return set_nonce(for_next_key, number_, 1) && update(zeros, key_nbytes, key) &&
           LibCrypto::find()->EVP_CipherInit_ex(context_, nullptr, nullptr, bytes(key), nullptr,
                                                encrypts_) == 1;
}

EncryptedStream::EncryptedStream(int fd, const unsigned char* keys, uint64_t num_per_key)
    : fd_(fd),
      pid_(getpid()),
      encryption_(keys, true, num_per_key),
      decryption_(keys + key_nbytes, false, num_per_key) {}

ssize_t EncryptedStream::send(const iovec* parts, int count) {
    if (getpid() != pid_) {
        errno = EIO;
        return -1;
    }
    std::lock_guard<std::mutex> lock(sending_);
    size_t total = 0, done = 0;
    for (int i = 0; i < count; ++i) total += parts[i].iov_len;
    while (done < total) {
        size_t nbytes = std::min(total - done, max_record_nbytes);
        if (!has_unsent() && !write_record(parts, count, done, nbytes)) return -1;
        if (!flush()) return errno == EAGAIN && done > 0 ? static_cast<ssize_t>(done) : -1;
        done += taken_;
    }
    return static_cast<ssize_t>(done);
}

// Encrypts so many bytes of the parts, after the first `skip`.
bool EncryptedStream::write_record(const iovec* parts, int count, size_t skip, size_t nbytes) {
    if (!out_) out_.reset(new char[whole_nbytes]);
    uint32_t size = static_cast<uint32_t>(nbytes);
    std::memcpy(out_.get(), &size, header_nbytes);
    char* place = out_.get() + header_nbytes;
    bool is_good = encryption_.begin(out_.get(), header_nbytes);
    for (int i = 0; i < count && nbytes > 0 && is_good; ++i) {
        size_t begin = std::min(skip, parts[i].iov_len);
        size_t part = std::min(parts[i].iov_len - begin, nbytes);
        skip -= begin;
        if (part == 0) continue;
        is_good = encryption_.update(static_cast<char*>(parts[i].iov_base) + begin, part, place);
        place += part;
        nbytes -= part;
    }
    if (!is_good || !encryption_.end(place)) {
        errno = EIO;
        return false;
    }
    out_nbytes_ = header_nbytes + size + tag_nbytes;
    unsent_ = 0;
    taken_ = size;
    return true;
}

bool EncryptedStream::flush() {
    while (has_unsent()) {
        ssize_t count =
            ::send(fd_, out_.get() + unsent_, out_nbytes_ - unsent_, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return false;
        unsent_ += static_cast<size_t>(count);
    }
    return true;
}

ssize_t EncryptedStream::recv(char* data, size_t nbytes) {
    std::lock_guard<std::mutex> lock(receiving_);
    size_t done = take_decrypted(data, nbytes);
    while (done < nbytes) {
        ssize_t size = read_record_size();
        // The rest stays in the socket, so that poll(2) knows of it.
        if (size > static_cast<ssize_t>(nbytes - done) && done > 0) break;
        if (size > static_cast<ssize_t>(nbytes)) {
            if ((size = read_ahead()) > 0) done = take_decrypted(data, nbytes);
        } else if (size > 0 && (size = read_record(data + done)) > 0) {
            done += static_cast<size_t>(size);
        }
        if (size <= 0) return done > 0 ? static_cast<ssize_t>(done) : size;
    }
    return static_cast<ssize_t>(done);
}

ssize_t EncryptedStream::peek(char* data, size_t nbytes) {
    std::lock_guard<std::mutex> lock(receiving_);
    ssize_t size = 1;
    while (pending() < nbytes && size > 0) size = read_ahead();
    size_t count = std::min(pending(), nbytes);
    std::memcpy(data, decrypted_.data() + begin_, count);
    return count > 0 ? static_cast<ssize_t>(count) : size;
}

// The number of bytes of the next record; 0 at the end of the connection, or -1.
ssize_t EncryptedStream::read_record_size() {
    if (error_ != 0) return fail(error_);
    if (!in_) in_.reset(new char[whole_nbytes + header_nbytes]);
    while (in_nbytes_ < header_nbytes) {
        ssize_t count = read_socket(header_nbytes);
        if (count <= 0) return count;
    }
    uint32_t size;
    std::memcpy(&size, in_.get(), header_nbytes);
    if (size == 0 || size > max_record_nbytes) return fail(EBADMSG);
    return size;
}

// Decrypts the next record, once it is here whole; as read_record_size.
ssize_t EncryptedStream::read_record(char* data) {
    ssize_t size = read_record_size();
    if (size <= 0) return size;
    size_t nbytes = static_cast<size_t>(size), whole = header_nbytes + nbytes + tag_nbytes;
    while (in_nbytes_ < whole) {
        ssize_t count = read_socket(whole + header_nbytes);
        if (count <= 0) return count;
    }
    if (!decryption_.begin(in_.get(), header_nbytes) ||
        !decryption_.update(in_.get() + header_nbytes, nbytes, data) ||
        !decryption_.end(in_.get() + header_nbytes + nbytes))
        return fail(EBADMSG);
    in_nbytes_ -= whole;
    std::memmove(in_.get(), in_.get() + whole, in_nbytes_);
    return size;
}

// Decrypts the next record behind what was not received yet.
ssize_t EncryptedStream::read_ahead() {
    ssize_t size = read_record_size();
    if (size <= 0) return size;
    decrypted_.erase(0, begin_);
    begin_ = 0;
    size_t before = decrypted_.size();
    decrypted_.resize(before + static_cast<size_t>(size));
    size = read_record(&decrypted_[before]);
    if (size <= 0) decrypted_.resize(before);
    return size;
}

// Reads until `wanted` bytes are in the buffer, or fewer.
ssize_t EncryptedStream::read_socket(size_t wanted) {
    ssize_t count = ::recv(fd_, in_.get() + in_nbytes_, wanted - in_nbytes_, MSG_DONTWAIT);
    if (count < 0 && errno != EAGAIN && errno != EINTR) return fail(errno);
    in_nbytes_ += static_cast<size_t>(std::max<ssize_t>(count, 0));
    return count;
}

ssize_t EncryptedStream::fail(int error) {
    errno = error_ = error;
    return -1;
}

size_t EncryptedStream::take_decrypted(char* data, size_t nbytes) {
    size_t count = std::min(pending(), nbytes);
    std::memcpy(data, decrypted_.data() + begin_, count);
    begin_ += count;
    return count;
}

}  // namespace encryption
