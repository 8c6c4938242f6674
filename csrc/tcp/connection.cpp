#include "tcp/connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tcp {
namespace {

constexpr size_t header_nbytes = 12;
constexpr size_t buffer_nbytes = 64 << 10;   // bytes that have arrived before they are asked for
constexpr uint64_t direct_nbytes = 8 << 10;  // data from this size on is read to its place at once

struct Header {
    uint64_t nbytes;
    uint32_t text_nbytes;
};

void pack(Header header, char* data) {
    std::memcpy(data, &header.nbytes, sizeof header.nbytes);
    std::memcpy(data + sizeof header.nbytes, &header.text_nbytes, sizeof header.text_nbytes);
}

Header unpack(const char* data) {
    Header header;
    std::memcpy(&header.nbytes, data, sizeof header.nbytes);
    std::memcpy(&header.text_nbytes, data + sizeof header.nbytes, sizeof header.text_nbytes);
    return header;
}

// The parts of a message that are left after so many bytes.
int remaining_parts(iovec* parts, int count, uint64_t done) {
    int first = 0;
    while (first < count && done >= parts[first].iov_len) done -= parts[first++].iov_len;
    std::copy(parts + first, parts + count, parts);
    if (first == count) return 0;
    parts[0].iov_base = static_cast<char*>(parts[0].iov_base) + done;
    parts[0].iov_len -= done;
    return count - first;
}

}  // namespace

PeerLink::PeerLink(int peer, int fd, const std::string& keys)
    : fd(fd),
      peer_(peer),
      stream_(keys.empty() ? nullptr
                           : std::make_unique<encryption::EncryptedStream>(
                                 fd, reinterpret_cast<const unsigned char*>(keys.data()))) {}

void PeerLink::send(TcpMessage& message) {
    if (message.done == 0 && !is_open()) throw find_end({peer_, 0, 0, "it closed the connection"});
    char header[header_nbytes];
    pack({message.nbytes, static_cast<uint32_t>(message.text.size())}, header);
    uint64_t total = header_nbytes + message.text.size() + message.nbytes;
    iovec parts[3] = {{header, header_nbytes},
                      {const_cast<char*>(message.text.data()), message.text.size()},
                      {message.data, message.nbytes}};
    msghdr packet = {};
    packet.msg_iov = parts;
    packet.msg_iovlen = static_cast<size_t>(remaining_parts(parts, 3, message.done));
    is_sending_ = true;
    ssize_t count = stream_ ? stream_->send(parts, static_cast<int>(packet.msg_iovlen))
                            : sendmsg(fd, &packet, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN && errno != EINTR) throw find_end({peer_, 0, errno, ""});
    message.done += static_cast<uint64_t>(std::max<ssize_t>(count, 0));
    message.is_finished = message.done == total;
    message.must_wait = !message.is_finished;
    if (message.must_wait && !is_open()) throw find_end({peer_, 0, 0, "it closed the connection"});
    is_sending_ = (message.done > 0 || (stream_ && stream_->has_unsent())) && !message.is_finished;
}

void PeerLink::receive(TcpMessage& message, std::string* mismatch) {
    std::lock_guard<std::mutex> lock(receiving_);
    if (!message.has_header && !read_header(message, mismatch)) {
        message.must_wait = true;
        return;
    }
    message.done += take_buffered(message);
    unread_ = message.nbytes - message.done;
    while (message.done < message.nbytes) {
        char* data = message.is_mismatch ? buffer_.get() : message.data + message.done;
        size_t room = message.nbytes - message.done;
        if (message.is_mismatch) room = std::min(room, buffer_nbytes);
        ssize_t count = read(data, room);
        message.done += static_cast<uint64_t>(std::max<ssize_t>(count, 0));
        unread_ = message.nbytes - message.done;
        message.must_wait = count < static_cast<ssize_t>(room);
        if (message.must_wait) break;
    }
    message.is_finished = message.done == message.nbytes;
}

// Whether the other end still reads.
bool PeerLink::is_open() const {
    pollfd poll_fd{fd, POLLRDHUP, 0};
    return poll(&poll_fd, 1, 0) <= 0;
}

// The notice that the other end gave for closing, if it is in reach; else the error of the socket,
// which the kernel gives once. A thread that receives meanwhile finds it by itself.
Ended PeerLink::find_end(Ended otherwise) const {
    std::unique_lock<std::mutex> lock(receiving_, std::try_to_lock);
    if (!lock) return otherwise;
    std::string unread(buffer_.get() + begin_, end_ - begin_),
        peeked(header_nbytes + longest_text, 0);
    ssize_t count = stream_ ? stream_->peek(&peeked[0], peeked.size())
                            : recv(fd, &peeked[0], peeked.size(), MSG_PEEK | MSG_DONTWAIT);
    if (count < 0 && errno != EAGAIN && errno != EINTR && otherwise.error == 0)
        otherwise = failed(errno);
    unread.append(peeked, 0, static_cast<size_t>(std::max<ssize_t>(count, 0)));
    size_t begin = unread_;
    while (begin <= unread.size() && unread.size() - begin >= header_nbytes) {
        Header header = unpack(unread.data() + begin);
        begin += header_nbytes;
        if (header.nbytes >= first_notice)
            return {peer_, header.nbytes, 0, unread.substr(begin, header.text_nbytes)};
        if (header.nbytes > unread.size()) break;
        begin += header.text_nbytes + header.nbytes;
    }
    return otherwise;
}

bool PeerLink::read_header(TcpMessage& message, std::string* mismatch) {
    bool is_direct = message.nbytes >= direct_nbytes;
    size_t expected = is_direct ? header_nbytes + message.text.size() : buffer_nbytes;
    while (end_ - begin_ < header_nbytes)
        if (!fill_buffer(expected)) return false;
    Header header = unpack(buffer_.get() + begin_);
    if (header.text_nbytes > longest_text)
        throw Ended{peer_, 0, 0,
                    "a header announces a text of " + std::to_string(header.text_nbytes) +
                        " bytes, more than " + std::to_string(longest_text)};
    while (end_ - begin_ < header_nbytes + header.text_nbytes)
        if (!fill_buffer(buffer_nbytes)) return false;
    std::string_view text(buffer_.get() + begin_ + header_nbytes, header.text_nbytes);
    if (header.nbytes >= first_notice) throw Ended{peer_, header.nbytes, 0, std::string(text)};
    message.has_header = true;
    message.is_mismatch = header.nbytes != message.nbytes || text != message.text;
    if (message.is_mismatch) *mismatch = text;
    message.nbytes = header.nbytes;
    begin_ += header_nbytes + text.size();
    return true;
}

// Reads what has arrived behind what is in the buffer, up to so many bytes in all; whether anything
// had.
bool PeerLink::fill_buffer(size_t most) {
    if (!buffer_) buffer_.reset(new char[buffer_nbytes]);
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    ssize_t count = read(buffer_.get() + end_, most - end_);
    end_ += static_cast<size_t>(std::max<ssize_t>(count, 0));
    return count > 0;
}

size_t PeerLink::take_buffered(TcpMessage& message) {
    size_t count = std::min<uint64_t>(message.nbytes - message.done, end_ - begin_);
    if (!message.is_mismatch && count > 0)
        std::memcpy(message.data + message.done, buffer_.get() + begin_, count);
    begin_ += count;
    return count;
}

// -1 if nothing has arrived.
ssize_t PeerLink::read(char* data, size_t nbytes) {
    ssize_t count = stream_ ? stream_->recv(data, nbytes) : recv(fd, data, nbytes, MSG_DONTWAIT);
    if (count < 0 && errno != EAGAIN && errno != EINTR) throw failed(errno);
    if (count == 0) throw Ended{peer_, 0, 0, "it closed the connection"};
    return count;
}

Ended PeerLink::failed(int error) const {
    if (error == EBADMSG) return {peer_, 0, 0, encryption::altered};
    return {peer_, 0, error, ""};
}

void PeerLink::announce_end(uint64_t notice, std::string_view text) {
    text = text.substr(0, longest_text);
    char packet[header_nbytes + longest_text];
    pack({notice, static_cast<uint32_t>(text.size())}, packet);
    std::memcpy(packet + header_nbytes, text.data(), text.size());
    iovec part = {packet, header_nbytes + text.size()};
    if (!is_sending_ && stream_) stream_->send(&part, 1);
    if (!is_sending_ && !stream_)
        (void)!::send(fd, packet, part.iov_len, MSG_DONTWAIT | MSG_NOSIGNAL);
    shutdown(fd, SHUT_RDWR);  // wakes a thread that waits here, too
}

}  // namespace tcp
