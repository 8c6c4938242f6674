// One connection of this rank to another, and the messages on it.
//
// A message is a header (bytes of data and bytes of text, little-endian), a text that describes the
// message, and its data. A header with a notice in place of a size is the last: its text says why
// no message follows.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "encryption/encrypted_stream.h"

namespace tcp {

// The connection has ended. notice: of the other end, or 0; error: an errno, or 0.
struct Ended {
    int peer;
    uint64_t notice;
    int error;
    std::string text;
};

constexpr size_t longest_text = 4096;               // bytes: a receiver refuses a longer one
constexpr uint64_t first_notice = UINT64_MAX - 15;  // sizes from this on are notices

// One message on its way. It is received into `data` only if it is what is expected.
struct TcpMessage {
    bool is_send;
    int peer;
    char* data;
    uint64_t nbytes;
    std::string_view text;
    int buffer = 0;
    int round = 0;
    TcpMessage* next = nullptr;  // on the same connection, in the same direction
    uint64_t done = 0;           // bytes of the whole message to send, or of the data to receive
    bool has_header = false;     // received
    bool is_mismatch = false;
    bool is_finished = false;
    bool must_wait = false;  // until poll(2) names its connection
};

// One thread may send while another receives.
class PeerLink {
  public:
    // keys: of an encrypted connection, or nothing.
    PeerLink(int peer, int fd, const std::string& keys);

    // Both move what can be moved without waiting, and throw Ended: send, too, if the other end
    // will not read it.
    void send(TcpMessage& message);
    // *mismatch becomes the text of a message that is not the expected one, which is dropped.
    void receive(TcpMessage& message, std::string* mismatch);
    // Tells the other end why nothing follows, if that takes no waiting, and ends both directions.
    void announce_end(uint64_t notice, std::string_view text);

    const int fd;

  private:
    bool read_header(TcpMessage& message, std::string* mismatch);
    bool fill_buffer(size_t most);
    size_t take_buffered(TcpMessage& message);
    ssize_t read(char* data, size_t nbytes);
    Ended failed(int error) const;
    bool is_open() const;
    Ended find_end(Ended otherwise) const;

    const int peer_;
    const std::unique_ptr<encryption::EncryptedStream> stream_;  // of an encrypted connection
    std::atomic<bool> is_sending_{false};  // a part of a message has been sent, perhaps
    mutable std::mutex receiving_;
    uint64_t unread_ = 0;  // bytes of the message that is received
    std::unique_ptr<char[]> buffer_;
    size_t begin_ = 0, end_ = 0;  // of what is in the buffer
};

}  // namespace tcp
