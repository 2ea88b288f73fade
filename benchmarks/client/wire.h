// The bytes of a connected socket through TLS, for clients that are compiled with it.
#pragma once

#include <fcntl.h>
#ifdef WITH_TLS
#include <openssl/ssl.h>
#endif
#include <sys/types.h>

#include <cerrno>
#include <string>

#include "requests.h"

#ifdef WITH_TLS

// The bytes of a connected socket, through TLS; as recv and send they fail with EAGAIN.
class Wire {
 public:
  explicit Wire(int descriptor) : ssl_(SSL_new(context())) {
    // What gRPC servers ask for.
    SSL_set_alpn_protos(ssl_, reinterpret_cast<const unsigned char*>("\2h2"), 3);
    SSL_set_fd(ssl_, descriptor);
    if (SSL_connect(ssl_) != 1) fail("the server refused the handshake of TLS");
    ::fcntl(descriptor, F_SETFL, O_NONBLOCK);
  }

  // Takes all records that are there: one alone would cost a look at the socket each.
  ssize_t receive(char* data, std::size_t size) {
    std::size_t got = 0;
    while (got < size) {
      const int count = SSL_read(ssl_, data + got, static_cast<int>(size - got));
      if (count <= 0) return got == 0 ? outcome(count) : static_cast<ssize_t>(got);
      got += static_cast<std::size_t>(count);
    }
    return static_cast<ssize_t>(got);
  }

  // Bytes that the poller does not know of: they have left the socket.
  [[nodiscard]] bool pending() const { return SSL_pending(ssl_) != 0; }

  ssize_t send(const std::string& data) {
    const int count = SSL_write(ssl_, data.data(), static_cast<int>(data.size()));
    return count > 0 ? count : outcome(count);
  }

 private:
  static SSL_CTX* context() {
    static SSL_CTX* const context = [] {
      SSL_CTX* const made = SSL_CTX_new(TLS_client_method());
      // What is unsent moves as more is added to it.
      SSL_CTX_set_mode(made, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
      return made;
    }();
    return context;
  }

  ssize_t outcome(int count) {
    const int error = SSL_get_error(ssl_, count);
    errno = error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? EAGAIN : ECONNRESET;
    return -1;
  }

  SSL* ssl_;
};

#else

class Wire {
 public:
  explicit Wire(int) { fail("this client is compiled without TLS"); }
  static ssize_t receive(char*, std::size_t) { return -1; }
  static bool pending() { return false; }
  static ssize_t send(const std::string&) { return -1; }
};

#endif
