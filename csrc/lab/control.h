// Text commands, one a line, from the configuration file and from the control socket; one line answers each.
#pragma once

#include <poll.h>

#include <string>
#include <vector>

#include "host.h"
#include "network.h"

namespace lab {

class Router;

// Applies "path I J key=value ...", "node I key=value ...", "cut I J sport dport" or "restore I J".
// I and J are host indices or *. Throws std::runtime_error on anything else.
void apply(Network& network, const std::string& line);

class ControlServer {
public:
    ControlServer(std::vector<HostDevice>& devices, Network& network, Router& router)
        : devices_(devices), network_(network), router_(router) {}

    void accept(int listener);
    void add_clients(std::vector<pollfd>& fds) const;
    bool has_clients() const { return !clients_.empty(); }
    bool serve(const std::vector<pollfd>& fds, size_t first);  // false: told to quit

private:
    struct Client {
        int fd;
        std::string input;
    };
    std::string answer(const std::string& line, bool* quit);
    std::string statistics() const;

    std::vector<HostDevice>& devices_;
    Network& network_;
    Router& router_;
    std::vector<Client> clients_;
};

}  // namespace lab
