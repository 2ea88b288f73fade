// Who asks: programs, pages of this server and of listed origins, or other pages in the browser of
// one who reaches the server, which must not use it in that user's place.
//
// Browsers name the page's origin (Origin), and how it relates to the server (Sec-Fetch-Site),
// which no page can change. A page that has its own name point to this machine (DNS rebinding) gets
// the relation "same-origin", so that a server for this machine alone looks at the Host, too.
#pragma once

#include "net/http1_reader.h"
#include "std.h"

namespace gpubridge::http1 {

enum class Asker : std::uint8_t {
  kOwn,        // a program, or a page of this server
  kListed,     // a page of a listed origin
  kOther,      // another page
  kOtherHost,  // whoever, by a name that is none of this server's
};

class Origins {
 public:
  // `listed`: origins as browsers write them, or `*` for all. `names`: the hosts, in lower case,
  // that may be asked for beside addresses and names of loopback; all may without it.
  Origins(std::vector<std::string> listed, std::optional<std::vector<std::string>> names);

  [[nodiscard]] Asker asker(const Head& head) {
    if (any_) return head.from_page() && head.field("origin") ? Asker::kListed : Asker::kOwn;
    if (names_ && !is_own_host(head)) return Asker::kOtherHost;
    return head.from_page() ? asker_of_page(head) : Asker::kOwn;
  }

 private:
  [[nodiscard]] bool is_own_host(const Head& head);
  [[nodiscard]] bool is_own_name(std::string_view authority) const;
  [[nodiscard]] Asker asker_of_page(const Head& head) const;

  std::vector<std::string> listed_;
  std::optional<std::vector<std::string>> names_;
  bool any_;
  // The last Host that was one: most requests have the same.
  std::string last_host_;
};

// The answer to a browser that asks whether a page of a listed origin may send a request; nothing
// for another request.
[[nodiscard]] std::optional<std::string> preflight_fields(const Head& head);

// The fields with which a browser lets a page of a listed origin read an answer.
[[nodiscard]] std::string readable_fields(const Head& head);

}  // namespace gpubridge::http1
