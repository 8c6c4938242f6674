// A connection whose bytes are encrypted, over a socket that does not block.
//
// Bytes travel in records: their number (32 bits, little-endian), the bytes, encrypted by
// AES-256-GCM, and a tag that authenticates both. The nonce of a record is its number in its
// direction, and each direction has a key of its own: a record that was altered, repeated, left out
// or moved does not decrypt, and nothing after it is received. A key serves so many records, and
// then makes the next key, since AES-GCM is safe for a bounded number of bytes.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace encryption {

constexpr size_t key_nbytes = 32, tag_nbytes = 16;
constexpr size_t max_record_nbytes = 64 << 10;
constexpr uint64_t records_per_key = 1 << 22;
constexpr const char* altered = "what arrived was altered, repeated or left out on its way here";

// The records of one direction. Each function is false if libcrypto fails.
class RecordCipher {
  public:
    RecordCipher(const unsigned char* key, bool encrypts, uint64_t num_per_key);
    ~RecordCipher();
    RecordCipher(const RecordCipher&) = delete;

    // header: authenticated, and not encrypted.
    bool begin(const char* header, size_t nbytes);
    bool update(const char* in, size_t nbytes, char* out);
    bool end(char* tag);  // writes it, or compares with it

  private:
    bool set_nonce(uint32_t purpose, uint64_t number, int encrypts);
    bool change_key();

    void* const context_;
    bool has_key_ = false;
    const bool encrypts_;
    const uint64_t num_per_key_;
    uint64_t number_ = 0;  // of the next record
};

// One thread may send while another receives. A forked child cannot send: it would encrypt with the
// nonces of its parent.
class EncryptedStream {
  public:
    // keys: to send with, and to receive with. libcrypto must be there.
    EncryptedStream(int fd, const unsigned char* keys, uint64_t num_per_key = records_per_key);

    // As sendmsg(2): the bytes that were taken. After EAGAIN the same bytes must come first again,
    // for some may be encrypted and on their way.
    ssize_t send(const iovec* parts, int count);
    bool has_unsent() const { return unsent_ < out_nbytes_; }
    // As recv(2), and with errno EBADMSG if a record does not decrypt.
    ssize_t recv(char* data, size_t nbytes);
    // As recv(2) with MSG_PEEK.
    ssize_t peek(char* data, size_t nbytes);
    // Bytes that are here already, which poll(2) does not know of.
    size_t pending() const { return decrypted_.size() - begin_; }

  private:
    bool write_record(const iovec* parts, int count, size_t skip, size_t nbytes);
    bool flush();
    ssize_t read_record_size();
    ssize_t read_record(char* data);
    ssize_t read_ahead();
    ssize_t read_socket(size_t wanted);
    ssize_t fail(int error);
    size_t take_decrypted(char* data, size_t nbytes);

    const int fd_, pid_;
    RecordCipher encryption_, decryption_;
    std::mutex sending_, receiving_;

    std::unique_ptr<char[]> out_;  // one record
    size_t out_nbytes_ = 0, unsent_ = 0;
    size_t taken_ = 0;  // bytes that are in it

    std::unique_ptr<char[]> in_;  // one record, and the header of the next
    size_t in_nbytes_ = 0;
    int error_ = 0;          // of receiving: the kernel gives it once
    std::string decrypted_;  // from begin_ on not received yet
    size_t begin_ = 0;
};

}  // namespace encryption
