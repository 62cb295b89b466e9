// A host of the lab: a network namespace with one TUN device. Only file descriptors of this process hold it, so that it
// ends with the process.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lab {

struct HostDevice {
    std::string name, address, address6;  // IPv4 and IPv6; empty: none
    int tun = -1;         // read and write packets
    int ns = -1;          // the namespace
    int statistics = -1;  // /proc/net/dev of the namespace
    uint64_t inode = 0;   // identifies the namespace in /proc/PID/ns/net
};

using Sysctls = std::vector<std::pair<std::string, std::string>>;

// Moves this process into a new user namespace when it may not make network namespaces otherwise.
// All functions here throw std::runtime_error with a sentence for the user.
void gain_privilege();

HostDevice make_host(const std::string& name, const std::string& address, const std::string& address6, int mtu,
                     const Sysctls& sysctls);

// Replaces the IPv4 address of a host.
void set_host_address(HostDevice& host, const std::string& address);

uint64_t kernel_drops(const HostDevice& host);  // packets that the kernel dropped because the router was too slow

// Lets nobody `enter` any more: who is not found inside from now on ends itself.
void close_doors(std::vector<HostDevice>& hosts);

// Kills every process inside the hosts' namespaces, this one excepted; returns how many.
int kill_inside(const std::vector<HostDevice>& hosts);

// Joins namespace `fd` of process `pid` (and its user namespace when need be) and runs argv. Returns only by throwing.
void enter(pid_t pid, int fd, char** argv);

}  // namespace lab
