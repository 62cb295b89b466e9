// Text commands, one per line, from the configuration file and the control socket; one line answers each command.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "host.h"
#include "network.h"

namespace lab {

class Router;

// Applies "path I J key=value ...", "node I key=value ...", "gateway NAME key=value ...", "cut I J sport dport" or
// "restore I J". I and J are host indices or *; IPv4 addresses are numbers. Throws std::runtime_error on anything else.
void apply(Network& network, const std::string& line);

class ControlServer {
public:
    ControlServer(std::vector<HostDevice>& devices, Network& network, Router& router)
        : devices_(devices), network_(network), router_(router) {}

    int accept(int listener);  // the new client's descriptor, or -1
    bool serve(int client);    // reads commands and answers them; false: a command said to quit

private:
    std::string answer(const std::string& line, bool* quit);
    std::string statistics() const;
    void readdress(const std::string& line);

    std::vector<HostDevice>& devices_;
    Network& network_;
    Router& router_;
    std::map<int, std::string> clients_;  // descriptor -> the part of a line received so far
};

}  // namespace lab
