// Messages there and back over loopback: drumline's own records beside TLS 1.3 with a key that both
// ends have (OpenSSL's libssl, records of 16 KiB, TLS_AES_256_GCM_SHA384), in turns.
//
// Prints of each size the microseconds of every round: the size, own or tls, the times.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "encryption/encrypted_stream.h"

namespace {

constexpr unsigned char key[2 * encryption::key_nbytes] = {};  // the same in both directions

void require(bool is_good, const char* what) {
    if (is_good) return;
    std::perror(what);
    std::exit(1);
}

// One end: send all, receive all. Both kinds are over a socket that does not block.
struct End {
    virtual ~End() = default;
    virtual ssize_t send(const char* data, size_t nbytes) = 0;
    virtual ssize_t recv(char* data, size_t nbytes) = 0;
    int fd;

    void wait(short events) {
        pollfd one = {fd, events, 0};
        poll(&one, 1, -1);
    }
    void send_all(const char* data, size_t nbytes) {
        for (size_t done = 0; done < nbytes;) {
            ssize_t count = send(data + done, nbytes - done);
            if (count > 0)
                done += static_cast<size_t>(count);
            else
                wait(POLLOUT);
        }
    }
    void recv_all(char* data, size_t nbytes) {
        for (size_t done = 0; done < nbytes;) {
            ssize_t count = recv(data + done, nbytes - done);
            require(count != 0, "the other end has left");
            if (count > 0)
                done += static_cast<size_t>(count);
            else
                wait(POLLIN);
        }
    }
};

struct Own : End {
    encryption::EncryptedStream stream;
    explicit Own(int socket) : stream(socket, key) { fd = socket; }
    ssize_t send(const char* data, size_t nbytes) override {
        iovec part = {const_cast<char*>(data), nbytes};
        return stream.send(&part, 1);
    }
    ssize_t recv(char* data, size_t nbytes) override { return stream.recv(data, nbytes); }
};

// The session that both ends would resume: the external key of TLS 1.3.
SSL_SESSION* session(SSL* ssl) {
    const unsigned char suite[] = {0x13, 0x02};
    SSL_SESSION* resumed = SSL_SESSION_new();
    require(SSL_SESSION_set1_master_key(resumed, key, 48) == 1 &&
                SSL_SESSION_set_cipher(resumed, SSL_CIPHER_find(ssl, suite)) == 1 &&
                SSL_SESSION_set_protocol_version(resumed, TLS1_3_VERSION) == 1,
            "session");
    return resumed;
}
int of_client(SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* nbytes,
              SSL_SESSION** resumed) {
    *id = reinterpret_cast<const unsigned char*>("launch");
    *nbytes = 6;
    *resumed = session(ssl);
    return 1;
}
int of_server(SSL* ssl, const unsigned char*, size_t, SSL_SESSION** resumed) {
    *resumed = session(ssl);
    return 1;
}

struct Tls : End {
    SSL* ssl;
    Tls(int socket, bool is_server) {
        fd = socket;
        SSL_CTX* context = SSL_CTX_new(is_server ? TLS_server_method() : TLS_client_method());
        SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
        SSL_CTX_set_ciphersuites(context, "TLS_AES_256_GCM_SHA384");
        SSL_CTX_set_mode(context,
                         SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        SSL_CTX_set_read_ahead(context, 1);
        SSL_CTX_set_default_read_buffer_len(context, 64 << 10);
        SSL_CTX_set_num_tickets(context, 0);
        if (is_server)
            SSL_CTX_set_psk_find_session_callback(context, of_server);
        else
            SSL_CTX_set_psk_use_session_callback(context, of_client);
        ssl = SSL_new(context);
        SSL_set_fd(ssl, socket);
        for (int done = 0; done != 1;) {
            done = is_server ? SSL_accept(ssl) : SSL_connect(ssl);
            int error = SSL_get_error(ssl, done);
            require(done == 1 || error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE,
                    "handshake");
            if (done != 1) wait(error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT);
        }
    }
    ssize_t send(const char* data, size_t nbytes) override {
        return SSL_write(ssl, data, static_cast<int>(nbytes));
    }
    ssize_t recv(char* data, size_t nbytes) override {
        return SSL_read(ssl, data, static_cast<int>(nbytes));
    }
};

void pair_of(int sockets[2]) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    auto* place = reinterpret_cast<sockaddr*>(&address);
    require(bind(listener, place, size) == 0 && listen(listener, 1) == 0, "listen");
    getsockname(listener, place, &size);
    sockets[0] = socket(AF_INET, SOCK_STREAM, 0);
    require(connect(sockets[0], place, size) == 0, "connect");
    sockets[1] = accept(listener, nullptr, nullptr);
    close(listener);
    for (int side = 0, one = 1; side < 2; ++side) {
        setsockopt(sockets[side], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        fcntl(sockets[side], F_SETFL, O_NONBLOCK);
    }
}

}  // namespace

int main(int, char** arguments) {
    int rounds = std::atoi(arguments[1]), own[2], tls[2];
    pair_of(own);
    pair_of(tls);
    bool is_server = fork() == 0;
    Own first(own[is_server]);
    Tls second(tls[is_server], is_server);
    End* ends[] = {&first, &second};
    const char* names[] = {"own", "tls"};
    for (size_t nbytes :
         {size_t{8}, size_t{8} << 10, size_t{64} << 10, size_t{1} << 20, size_t{64} << 20}) {
        std::vector<char> data(nbytes, 7), back(nbytes);
        int count = nbytes > (1 << 20) ? (rounds + 9) / 10 : rounds;
        std::vector<double> times[2];
        for (int turn = 0; turn < 2 * (count + 3); ++turn) {
            End* end = ends[turn % 2];
            auto start = std::chrono::steady_clock::now();
            if (is_server) {
                end->recv_all(back.data(), nbytes);
                end->send_all(back.data(), nbytes);
            } else {
                end->send_all(data.data(), nbytes);
                end->recv_all(back.data(), nbytes);
                require(back == data, "what came back differs");
            }
            std::chrono::duration<double, std::micro> took =
                std::chrono::steady_clock::now() - start;
            if (turn >= 6) times[turn % 2].push_back(took.count());
        }
        for (int kind = 0; kind < 2 && !is_server; ++kind) {
            std::printf("%zu %s", nbytes, names[kind]);
            for (double time : times[kind]) std::printf(" %.2f", time);
            std::printf("\n");
        }
    }
    if (!is_server) wait(nullptr);
    return 0;
}
