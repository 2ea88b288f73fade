#include "net/http1_origins.h"

#include <arpa/inet.h>

#include "text.h"

namespace gpubridge::http1 {
namespace {

// Names of loopback that resolvers have by themselves (RFC 6761) or systems list.
constexpr std::array<std::string_view, 4> kLoopback = {"localhost", "localhost.localdomain",
                                                       "ip6-localhost", "ip6-loopback"};
constexpr std::string_view kBelowLocalhost = ".localhost";

std::string lowered(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
  return lower;
}

// A host and perhaps a port, without the port and the dot that may end a name.
std::string_view without_port(std::string_view authority) {
  const std::size_t colon = authority.rfind(':');
  const bool has_port = colon != std::string_view::npos && !authority.ends_with(']');
  if (has_port) authority = authority.substr(0, colon);
  if (authority.ends_with('.')) authority.remove_suffix(1);
  return authority;
}

bool is_address(std::string_view host) {
  std::array<unsigned char, sizeof(in6_addr)> address{};
  if (host.starts_with('[')) {
    const std::string inner(host.substr(1, host.size() - 2));
    return host.ends_with(']') && inet_pton(AF_INET6, inner.c_str(), address.data()) == 1;
  }
  return inet_pton(AF_INET, std::string(host).c_str(), address.data()) == 1;
}

// What lies between "://" and the next slash.
std::string_view authority_of(std::string_view url) {
  const std::size_t at = url.find("://");
  if (at == std::string_view::npos) return {};
  url.remove_prefix(at + 3);
  return url.substr(0, url.find_first_of("/?#"));
}

template <typename Texts>
bool has(const Texts& texts, std::string_view text) {
  return std::ranges::find(texts, text) != texts.end();
}

}  // namespace

Origins::Origins(std::vector<std::string> listed, std::optional<std::vector<std::string>> names)
    : listed_(std::move(listed)), names_(std::move(names)), any_(has(listed_, "*")) {}

bool Origins::is_own_host(const Head& head) {
  if (head.hosts() > 1) return false;
  // Browsers always name one, and never in the target, which other clients may write as a URL.
  const std::string_view host = head.host();
  if (host.empty() || host == last_host_) return true;
  if (!is_own_name(host)) return false;
  last_host_ = host;
  return true;
}

bool Origins::is_own_name(std::string_view authority) const {
  const std::string host = lowered(without_port(authority));
  return has(kLoopback, host) || host.ends_with(kBelowLocalhost) || has(*names_, host) ||
         is_address(host);
}

Asker Origins::asker_of_page(const Head& head) const {
  const auto origin = head.field("origin");
  if (origin && has(listed_, *origin)) return Asker::kListed;
  const auto site = head.field("sec-fetch-site");
  if (!site) {
    const bool own = !origin || lowered(authority_of(*origin)) == lowered(head.host());
    return own ? Asker::kOwn : Asker::kOther;
  }
  // "none" is what the user typed. A link to this server opens it in a window of its own, which the
  // other page cannot read, and GET changes nothing.
  const bool opened = !origin && (head.method() == "GET" || head.method() == "HEAD") &&
                      head.field("sec-fetch-mode") == "navigate" &&
                      head.field("sec-fetch-dest") == "document";
  return *site == "same-origin" || *site == "none" || opened ? Asker::kOwn : Asker::kOther;
}

std::optional<std::string> preflight_fields(const Head& head) {
  if (head.method() != "OPTIONS" || !head.field("access-control-request-method")) {
    return std::nullopt;
  }
  std::string fields = "Access-Control-Allow-Methods: GET, POST\r\nAccess-Control-Max-Age: 600\r\n";
  if (const auto headers = head.field("access-control-request-headers")) {
    fields.append("Access-Control-Allow-Headers: ").append(*headers).append("\r\n");
  }
  return fields;
}

std::string readable_fields(const Head& head) {
  std::string fields = "Access-Control-Allow-Origin: ";
  fields.append(head.field("origin").value_or("null"));
  return fields.append("\r\nAccess-Control-Expose-Headers: *\r\nVary: Origin\r\n");
}

}  // namespace gpubridge::http1
